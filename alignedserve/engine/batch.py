"""Running requests as rows of arrays. A few numpy calls prepare a step with many decodes."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from alignedserve.engine.request import Request, Work
from alignedserve.kv.groups import LayerGroups
from alignedserve.ops.step import StepInputs
from alignedserve.types import BlockId


class Due:
    """The requests that get a token in an iteration, because it computes all of their pending tokens. In batch
    order."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        # Rows in the batch table.
        self.rows = np.fromiter((request.row for request in requests), dtype=np.intp, count=len(requests))

    @cached_property
    def is_plain_greedy(self) -> bool:
        return all(request.params.is_plain_greedy for request in self.requests)

    @cached_property
    def edited(self) -> list[int]:
        """Indices of requests with logits that are edited before sampling."""
        return [i for i, request in enumerate(self.requests) if request.params.edits_logits]

    @cached_property
    def logged(self) -> list[int]:
        """Indices of requests that asked for log-probabilities."""
        return [i for i, request in enumerate(self.requests) if request.params.logprobs is not None]

    @cached_property
    def counted(self) -> list[int]:
        """Indices of requests with output tokens that are counted, for penalties."""
        return [i for i, request in enumerate(self.requests) if request.params.has_penalties]


class Batch:
    """The work of one iteration: first decodes, then chunks. A decode computes the KV of the token sampled last.

    Chunks of one token come before longer ones, because GPU kernels need all entries of one token to be contiguous.
    In both parts, those that keep inputs come last, for the same reason. They are never decodes.
    """

    def __init__(self, work: Work) -> None:
        is_decode = [
            count == 1 == request.num_pending and bool(request.output) and request.layout.holds_kv
            for request, count in work
        ]
        decodes = [item for item, fits in zip(work, is_decode, strict=True) if fits]
        chunks = [item for item, fits in zip(work, is_decode, strict=True) if not fits]
        chunks.sort(key=lambda item: (item[1] != 1, not item[0].layout.holds_kv))
        self.num_decodes = len(decodes)
        self.work = decodes + chunks
        self.rows = np.array([request.row for request, _ in self.work], dtype=np.intp)
        self.counts = np.array([count for _, count in self.work], dtype=np.int32)
        self.is_reversed = np.array([request.layout.is_reversed for request, _ in self.work], dtype=np.int32)
        self.has_reversed = bool(self.is_reversed.any())
        self.adapters = np.array([request.adapter for request, _ in self.work], dtype=np.int32)
        self.has_adapters = bool(self.adapters.any())
        # Entries of `work` that get a token. Entries that get an embedding are kept apart; a decode never does.
        caught_up = [i for i, (request, count) in enumerate(self.work) if count == request.num_pending]
        chunk_entries = caught_up[self.num_decodes :]
        self.embedded_entries = [i for i in chunk_entries if self.work[i][0].pooling is not None]
        self.due_entries = caught_up[: self.num_decodes]
        self.due_entries += [i for i in chunk_entries if self.work[i][0].pooling is None]
        self.due = Due([self.work[i][0] for i in self.due_entries])

    @property
    def is_decode(self) -> bool:
        return self.num_decodes == len(self.work)


class BatchTable:
    def __init__(self, max_num_seqs: int, max_columns: int, block_size: int, groups: LayerGroups) -> None:
        self._block_size = block_size
        # [row, layer group, column]
        self._blocks = np.zeros((max_num_seqs, groups.num_groups, max_columns), dtype=np.int32)
        self._num_columns = np.zeros(max_num_seqs, dtype=np.int32)
        # Tokens that the row's columns can hold.
        self._room = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int32)
        self._last_token = np.zeros(max_num_seqs, dtype=np.int32)
        # Output tokens until max_output_len.
        self._num_left = np.zeros(max_num_seqs, dtype=np.int64)
        self._counting = np.arange(max_num_seqs + 1, dtype=np.int32)
        self.reset()

    def reset(self) -> None:
        """Frees every row, even if a request has it."""
        self._free_rows = list(reversed(range(len(self._last_token))))
        # The last iteration's batch, if it had decodes only and no request has entered or left since.
        self._decodes: Batch | None = None

    def enter(self, request: Request) -> None:
        self._decodes = None
        row = request.row = self._free_rows.pop()
        self._set_num_columns(request)
        self._num_computed[row] = request.num_computed
        self._last_token[row] = request.output[-1] if request.output else 0
        self._num_left[row] = request.max_output_len - len(request.output)

    def leave(self, request: Request) -> None:
        self._decodes = None
        self._free_rows.append(request.row)
        request.row = -1

    def add_columns(self, request: Request) -> None:
        """Enters the blocks that the request has got since the last call into its row. Nothing reads the entries of
        columns that it has passed."""
        first, groups = request.num_columns, request.held.groups
        for group, held in enumerate(groups):
            blocks = held[first:]
            self._blocks[request.row, group, first : first + len(blocks)] = blocks
        # A full group is ahead of the sliding ones while these wait for columns to be passed.
        request.num_columns = min(map(len, groups))
        self._set_num_columns(request)

    def set_block(self, request: Request, index: int, block: BlockId) -> None:
        """Replaces one of the request's blocks."""
        self._blocks[request.row, 0, index] = block

    def batch(self, work: Work) -> Batch:
        """Returns an iteration's batch. If the same decodes run again, the last batch is reused: only the arrays here
        have changed."""
        if self._decodes is not None and self._decodes.work == work:
            return self._decodes
        batch = Batch(work)
        self._decodes = batch if batch.is_decode else None
        return batch

    def outgrown(self, batch: Batch) -> list[int]:
        """Entries of the batch's work that need more blocks than are in their rows."""
        ends = self._num_computed[batch.rows] + batch.counts
        entries: list[int] = np.flatnonzero(ends > self._room[batch.rows]).tolist()
        return entries

    def computed(self, batch: Batch) -> None:
        self._num_computed[batch.rows] += batch.counts
        for request, count in batch.work:
            request.num_computed += count

    def append_tokens(self, due: Due, tokens: np.ndarray) -> np.ndarray:
        """Appends one token to each row, and returns how many more each may get. The caller appends to the requests'
        own outputs."""
        self._last_token[due.rows] = tokens
        self._num_left[due.rows] -= 1
        num_left: np.ndarray = self._num_left[due.rows]
        return num_left

    def fill(self, step: StepInputs, batch: Batch) -> np.ndarray:
        """Writes the batch into the step, with one sequence for each entry, in order.

        Returns for each entry the end of its outputs among the step's outputs.
        """
        step.wait_until_sent()
        num_columns = self._columns_of(batch)
        table = step.host_block_table(len(batch.work), num_columns)
        table[:] = self._blocks[batch.rows, :, :num_columns]
        if step.kept_inputs is not None:
            step.kept_inputs.begin()
        step.host.query_start[0] = 0
        self._fill_decodes(step, batch)
        output_ends = np.empty(len(batch.work), dtype=np.int32)
        output_ends[: batch.num_decodes] = self._counting[1 : batch.num_decodes + 1]
        start = num_outputs = batch.num_decodes
        for entry in range(batch.num_decodes, len(batch.work)):
            end, num_outputs = self._fill_chunk(step, batch, entry, start, num_outputs)
            if not batch.work[entry][0].layout.holds_kv:
                self._keep_inputs(step, batch, entry, slice(start, end), table[:, 0])
            start, output_ends[entry] = end, num_outputs
        if step.adapters is not None and batch.has_adapters:
            step.adapters.fill(batch.adapters, batch.counts, step.host.outputs[:num_outputs])
        elif step.adapters is not None:
            step.adapters.clear()
        step.commit(start, len(batch.work), num_outputs)
        return output_ends

    def _fill_decodes(self, step: StepInputs, batch: Batch) -> None:
        """Does for all decodes what `_fill_chunk` does for one entry."""
        num, host = batch.num_decodes, step.host
        rows = batch.rows[:num]
        positions = self._num_computed[rows]
        host.token_ids[:num] = self._last_token[rows]
        host.positions[:num] = positions
        slots = self._slots(rows, positions)
        if batch.has_reversed:
            slots = np.where(batch.is_reversed[:num], self._mirrored(slots), slots)
        host.slots[:, :num] = slots
        host.query_start[1 : num + 1] = self._counting[1 : num + 1]
        host.context_len[:num] = positions + 1
        host.is_reversed[:num] = batch.is_reversed[:num]
        host.outputs[:num] = self._counting[:num]

    def _fill_chunk(
        self, step: StepInputs, batch: Batch, entry: int, start: int, num_outputs: int
    ) -> tuple[int, int]:
        """Fills in one entry, from token `start` and output `num_outputs` of the step on. Returns the next token and
        output."""
        host, (request, count) = step.host, batch.work[entry]
        first, end = request.num_computed, start + count
        positions = np.arange(first, first + count, dtype=np.int32)
        host.token_ids[start:end] = request.tokens(first, first + count)
        host.positions[start:end] = positions
        slots = self._slots(request.row, positions)
        host.slots[:, start:end] = self._mirrored(slots) if request.layout.is_reversed else slots
        host.query_start[entry + 1] = end
        host.context_len[entry] = first + count
        host.is_reversed[entry] = request.layout.is_reversed
        wanted = request.num_outputs(count)
        host.outputs[num_outputs : num_outputs + wanted] = np.arange(end - wanted, end)
        return end, num_outputs + wanted

    def _columns_of(self, batch: Batch) -> int:
        """The number of block-table columns that the step needs. Restored KV needs as many as K and V would."""
        num_columns = int(self._num_columns[batch.rows].max())
        for request, count in batch.work[batch.num_decodes :]:
            if not request.layout.holds_kv:
                num_columns = max(num_columns, -(-(request.num_computed + count) // self._block_size))
        return num_columns

    def _keep_inputs(
        self, step: StepInputs, batch: Batch, entry: int, tokens: slice, table: np.ndarray
    ) -> None:
        """Points this entry's attention at restored KV."""
        request, count = batch.work[entry]
        if step.kept_inputs is None:
            raise RuntimeError(
                f"{request.request_id}: its inputs are kept, but there is no memory to restore its KV in"
            )
        first = request.num_computed
        blocks, slots = step.kept_inputs.add(
            entry, tokens, self._blocks[request.row, 0], first, first + count
        )
        table[entry, : len(blocks)] = blocks
        step.host.slots[0, tokens] = slots

    def _set_num_columns(self, request: Request) -> None:
        row = request.row
        self._num_columns[row] = request.num_columns
        self._room[row] = request.num_columns * request.layout.tokens_per_block(self._block_size)

    def _slots(self, rows: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """Returns slots as [group, position]."""
        column, offset = np.divmod(positions, self._block_size)
        slots: np.ndarray = self._blocks[rows, :, column].T * self._block_size
        slots += offset
        return slots

    def _mirrored(self, slots: np.ndarray) -> np.ndarray:
        """The slots for requests that fill their blocks from the last slot down."""
        mirrored: np.ndarray = slots + (self._block_size - 1 - 2 * (slots % self._block_size))
        return mirrored
