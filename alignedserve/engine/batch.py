"""Running requests as rows of arrays, so that a step of decodes is prepared by a few numpy calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alignedserve.engine.request import Request
from alignedserve.engine.step import StepInputs
from alignedserve.types import BlockId

Work = Sequence[tuple[Request, int]]


class BatchTable:
    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        self._block_size = block_size
        self._blocks = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=np.int32)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int32)
        self._last_token = np.zeros(max_num_seqs, dtype=np.int32)
        self.reset()

    def reset(self) -> None:
        """Every row is free, whoever had it."""
        self._free_rows = list(reversed(range(len(self._last_token))))

    def enter(self, request: Request) -> None:
        row = request.row = self._free_rows.pop()
        self._num_computed[row] = request.num_computed
        self._last_token[row] = request.output[-1] if request.output else 0

    def leave(self, request: Request) -> None:
        self._free_rows.append(request.row)
        request.row = -1

    def add_blocks(self, request: Request, blocks: Sequence[BlockId]) -> None:
        """Appends to the request's row; the request's count of blocks goes with it."""
        end = request.num_blocks + len(blocks)
        self._blocks[request.row, request.num_blocks : end] = blocks
        request.num_blocks = end

    def computed(self, work: Work) -> None:
        for request, count in work:
            request.num_computed += count
            self._num_computed[request.row] = request.num_computed

    def append_token(self, request: Request, token: int) -> None:
        request.output.append(token)
        self._last_token[request.row] = token

    def fill(self, step: StepInputs, work: Work) -> np.ndarray:
        """Writes the step that computes `work`, one sequence for each entry, in order.

        Returns where each entry's outputs end among the step's.
        """
        step.wait_until_sent()
        if all(count == 1 and request.output for request, count in work):
            return self._fill_decodes(step, work)
        return self._fill_chunks(step, work)

    def _fill_decodes(self, step: StepInputs, work: Work) -> np.ndarray:
        """The common case of `_fill_chunks`: every request computes the token it sampled last."""
        num, host = len(work), step.host
        rows = np.fromiter((request.row for request, _ in work), dtype=np.intp, count=num)
        positions = self._num_computed[rows]
        host.token_ids[:num] = self._last_token[rows]
        host.positions[:num] = positions
        block, offset = np.divmod(positions, self._block_size)
        host.slots[:num] = self._blocks[rows, block] * self._block_size + offset
        host.query_start[: num + 1] = np.arange(num + 1)
        host.context_len[:num] = positions + 1
        num_columns = int(block.max()) + 1
        step.host_block_table(num, num_columns)[:] = self._blocks[rows, :num_columns]
        host.outputs[:num] = np.arange(num)
        step.commit(num, num, num)
        return host.query_start[1 : num + 1]

    def _fill_chunks(self, step: StepInputs, work: Work) -> np.ndarray:
        host, start, num_outputs = step.host, 0, 0
        output_ends = np.empty(len(work), dtype=np.int32)
        num_columns = max(request.num_blocks for request, _ in work)
        table = step.host_block_table(len(work), num_columns)
        host.query_start[0] = 0
        for index, (request, count) in enumerate(work):
            first, end = request.num_computed, start + count
            positions = np.arange(first, first + count, dtype=np.int32)
            blocks = self._blocks[request.row, : request.num_blocks]
            host.token_ids[start:end] = request.tokens(first, first + count)
            host.positions[start:end] = positions
            block, offset = np.divmod(positions, self._block_size)
            host.slots[start:end] = blocks[block] * self._block_size + offset
            host.query_start[index + 1] = end
            host.context_len[index] = first + count
            table[index, : request.num_blocks] = blocks
            wanted = request.num_outputs(count)
            host.outputs[num_outputs : num_outputs + wanted] = np.arange(end - wanted, end)
            num_outputs += wanted
            output_ends[index] = num_outputs
            start = end
        step.commit(start, len(work), num_outputs)
        return output_ends
