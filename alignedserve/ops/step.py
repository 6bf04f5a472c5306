"""The inputs of one forward call, in buffers that keep their addresses for the life of an instance.

A step is a flat run of tokens ("varlen"): sequence s owns tokens query_start[s] .. query_start[s+1], the last query_len
tokens of its context. Prefill chunks and decodes differ only in query_len. Most tokens are computed only for their KV.
Hidden states are computed to the end only for the outputs, which are chosen beforehand. Buffers never move, so compiled
programs and CUDA graphs may keep their addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from alignedserve.kernels.cpu.structs import Step
from alignedserve.ops.kept_inputs import KeptInputs
from alignedserve.ops.step_adapters import StepAdapters
from alignedserve.ops.step_shape import Ladder, StepShape


class StepPlans(Protocol):
    """Plans that a backend makes for each step (`shared_plans.py`)."""

    def fill(self, step: StepInputs, num_decodes: int) -> None: ...

    def clear(self) -> None: ...

    def upload(self) -> None: ...


@dataclass(frozen=True)
class HostStep:
    """The buffers of `StepInputs` as numpy arrays on the host."""

    # Filled in by the engine.
    token_ids: np.ndarray
    positions: np.ndarray
    # [group, token]
    slots: np.ndarray
    outputs: np.ndarray
    query_start: np.ndarray
    context_len: np.ndarray
    is_reversed: np.ndarray
    # Filled in by `commit` and `host_block_table`.
    num_used: np.ndarray
    table_stride: np.ndarray
    first_chunk: np.ndarray
    chunk_start: np.ndarray
    context_start: np.ndarray
    block_table: np.ndarray


class StepInputs:
    """The inputs of a step. On a GPU they are one buffer, filled in pinned memory and sent in one piece by `upload`."""

    def __init__(
        self,
        max_tokens: int,
        max_seqs: int,
        max_blocks_per_seq: int,
        device: torch.device | str = "cpu",
        has_adapters: bool = False,
        num_groups: int = 1,
    ) -> None:
        """`max_blocks_per_seq`: blocks of one layer group (`kv/groups.py`). `has_adapters`: rows may have adapters."""
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.max_blocks_per_seq = max_blocks_per_seq
        self.num_groups = num_groups
        self.num_tokens = 0
        self.num_outputs = 0
        self.num_seqs = 0
        sizes = {
            # The number of values to send.
            "num_used": 1,
            "table_stride": 1,
            "query_start": max_seqs + 1,
            "context_len": max_seqs,
            "is_reversed": max_seqs,
            "first_chunk": 1,
            "chunk_start": max_seqs + 1,
            "context_start": max_seqs + 1,
            "token_ids": max_tokens,
            "positions": max_tokens,
            "slots": num_groups * _aligned(max_tokens),
            "outputs": max_tokens,
            "block_table": max_seqs * num_groups * max_blocks_per_seq,
        }
        places = _places(sizes)
        self._table_offset, size = places["block_table"].start, places["block_table"].stop
        self._device_buffer = torch.zeros(size, dtype=torch.int32, device=device)
        is_on_host = self._device_buffer.device.type == "cpu"
        self._host_buffer = self._device_buffer if is_on_host else torch.zeros_like(
            self._device_buffer, device="cpu"
        ).pin_memory()  # fmt: skip
        host = self._host_buffer.numpy()
        host_views = {name: host[place] for name, place in places.items()}
        host_views["slots"] = host_views["slots"].reshape(num_groups, -1)[:, :max_tokens]
        self.host = HostStep(**host_views)
        self._name_views({name: self._device_buffer[place] for name, place in places.items()})
        # The width of the block table's rows, and the number of columns in use.
        self.num_columns = self._num_filled = max_blocks_per_seq
        # Copies the host's buffer to the device's: (host, device).
        self.send: Callable[[torch.Tensor, torch.Tensor], object] = self._copy
        self._sent = None if is_on_host else torch.cuda.Event()  # type: ignore[no-untyped-call]
        # Whether sequences may be reversed. GPU kernels are compiled for it, so it must be set before.
        self.has_reversed = False
        # The shapes that steps are padded to.
        self.ladder = Ladder()
        self.shape = StepShape(0, 0, 0)
        self.kept_inputs: KeptInputs | None = None
        self.adapters = StepAdapters(max_tokens, device) if has_adapters else None
        # Given by a backend that reads keys once for several sequences.
        self.shared_plans: StepPlans | None = None

    def _name_views(self, views: dict[str, torch.Tensor]) -> None:
        """`views`: parts of the device's buffer."""
        # One entry per token.
        self.token_ids = views["token_ids"]
        self.positions = views["positions"]
        # [group, token]: where its K and V go, block id * block size + offset within the block. For sequences with kept
        # inputs, these are blocks of restored KV, here and in the block table.
        self.slots = views["slots"].view(self.num_groups, -1)[:, : self.max_tokens]
        # Per output, its token. Ascending; the outputs of a sequence are a run of its tokens, or none.
        self.outputs = views["outputs"]
        # One entry per sequence.
        self.query_start = views["query_start"]
        # Tokens of the sequence with KV after this step, its own queries included.
        self.context_len = views["context_len"]
        # 1 if the sequence fills its blocks from the last slot down, else 0.
        self.is_reversed = views["is_reversed"]
        # One entry per chunk, a sequence that computes more than one token. Chunks are the last sequences, from
        # `first_chunk` on. The entries are where the chunk's tokens begin, and where its context begins among the
        # chunks' contexts.
        self.first_chunk = views["first_chunk"]
        self.chunk_start = views["chunk_start"]
        self.context_start = views["context_start"]
        # Sequence s's blocks of group g begin at (s * num_groups + g) * table_stride. Rows are only as wide as this
        # step needs.
        self.flat_block_table = views["block_table"]
        self.table_stride = views["table_stride"]

    def keep_inputs(self, restored_kv: torch.Tensor) -> None:
        """Lets sequences keep inputs in place of K and V: see `KeptInputs`. Called before the model is compiled."""
        if self.num_groups > 1:
            raise ValueError(f"inputs can be kept where layers are one group, not {self.num_groups}")
        self.kept_inputs = KeptInputs(self.max_tokens, self.max_seqs, restored_kv)

    @property
    def has_adapters(self) -> bool:
        """Whether any row of this step has an adapter."""
        return self.adapters is not None and self.adapters.is_any

    @property
    def keeps_inputs(self) -> bool:
        """Whether any sequence of this step keeps its inputs."""
        return self.kept_inputs is not None and self.kept_inputs.num_seqs > 0

    @property
    def is_special(self) -> bool:
        """Whether this step can't be one that was captured: those have neither adapters nor kept inputs."""
        return self.keeps_inputs or self.has_adapters

    def host_block_table(self, num_seqs: int, num_columns: int) -> np.ndarray:
        """Returns [num_seqs, num_groups, num_columns] to be filled in. Its contents are undefined."""
        self._num_filled = num_columns
        if self._device_buffer is self._host_buffer:
            # Native programs got the width once, when they were recorded.
            rows = self.host.block_table.reshape(self.max_seqs, self.num_groups, -1)
            return rows[:num_seqs, :, :num_columns]
        self.num_columns = num_columns
        size = num_seqs * self.num_groups * num_columns
        return self.host.block_table[:size].reshape(num_seqs, self.num_groups, num_columns)

    def block_table_of(self, group: int) -> torch.Tensor:
        """The block table of a layer group, [at least num_seqs, columns]."""
        row = self.num_groups * self.num_columns
        num_rows = len(self.flat_block_table) // row
        rows = self.flat_block_table[: num_rows * row].view(num_rows, self.num_groups, self.num_columns)
        return rows[:, group]

    def output_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.shape.is_decode else x[self.outputs[: self.shape.num_outputs].long()]

    def commit(self, num_tokens: int, num_seqs: int, num_outputs: int) -> None:
        """Sets the sizes of the step in the host buffers."""
        self.num_tokens, self.num_seqs, self.num_outputs = num_tokens, num_seqs, num_outputs
        self.host.table_stride[0] = self.num_columns
        self.host.num_used[0] = self._table_offset + num_seqs * self.num_groups * self.num_columns
        is_decode = num_tokens == num_seqs == num_outputs
        own = StepShape(num_tokens, num_outputs, num_seqs) if is_decode else self._shape_with_chunks()
        if self.kept_inputs is not None:
            self.kept_inputs.commit(num_tokens, num_seqs)
        self._fill_up(own, own if self.is_special else self.ladder.rung(own))
        if self.shared_plans is not None:
            self.shared_plans.fill(self, own.num_decodes)

    def commit_empty(self, shape: StepShape) -> None:
        """Sets up an empty step, padded to this shape, to capture it."""
        self.num_tokens = self.num_seqs = self.num_outputs = 0
        self.host.table_stride[0] = self.num_columns = 1
        self.host.num_used[0] = self._table_offset
        self.host.query_start[0] = 0
        self.host.chunk_start[0] = self.host.context_start[0] = self.host.first_chunk[0] = 0
        self._fill_up(StepShape(0, 0, 0), shape)
        if self.shared_plans is not None:
            self.shared_plans.clear()

    def _shape_with_chunks(self) -> StepShape:
        starts = self.host.query_start[: self.num_seqs + 1]
        lengths = np.diff(starts)
        longer = np.flatnonzero(lengths != 1)
        first = int(longer[0]) if len(longer) else self.num_seqs
        num_chunks = self.num_seqs - first
        contexts = self.host.context_len[first : self.num_seqs]
        self.host.first_chunk[0] = first
        self.host.chunk_start[: num_chunks + 1] = starts[first:]
        self.host.context_start[0] = 0
        np.cumsum(contexts, out=self.host.context_start[1 : num_chunks + 1])
        return StepShape(
            num_tokens=self.num_tokens,
            num_outputs=self.num_outputs,
            num_decodes=first,
            num_chunks=num_chunks,
            max_chunk_len=int(lengths[first:].max(initial=0)),
            max_context_len=int(contexts.max(initial=0)),
            num_context_tokens=int(self.host.context_start[num_chunks]),
        )

    def _fill_up(self, own: StepShape, shape: StepShape) -> None:
        """Pads the step with tokens that write nothing, and with empty sequences and chunks."""
        self.shape = shape
        tokens = slice(own.num_tokens, shape.num_tokens)
        self.host.token_ids[tokens] = 0
        self.host.positions[tokens] = 0
        self.host.slots[:, tokens] = -1
        self.host.outputs[own.num_outputs : shape.num_outputs] = 0
        self.host.context_len[self.num_seqs : shape.num_decodes] = 0
        self.host.query_start[self.num_seqs + 1 : shape.num_decodes + 1] = own.num_tokens
        chunks = slice(own.num_chunks + 1, shape.num_chunks + 1)
        self.host.chunk_start[chunks] = own.num_tokens
        self.host.context_start[chunks] = own.num_context_tokens

    def packed(self) -> bytes:
        """The committed step, for `unpack` on another rank with the same sizes. It contains only the used parts of
        buffers."""
        counts = (self.num_tokens, self.num_seqs, self.num_outputs, self._num_filled)
        table = self.host_block_table(self.num_seqs, self._num_filled)
        filled = [*self._filled(*counts[:3]), table.reshape(-1)]
        # The adapters of its tokens come last, if any has one.
        if self.adapters is not None:
            filled.append(self.adapters.filled_rows)
        return np.concatenate([np.array(counts, dtype=np.int32), *filled]).tobytes()

    def unpack(self, data: bytes) -> None:
        values = np.frombuffer(data, dtype=np.int32)
        num_tokens, num_seqs, num_outputs, num_columns = values[:4].tolist()
        self.wait_until_sent()
        first = 4
        for array in self._filled(num_tokens, num_seqs, num_outputs):
            array[:] = values[first : first + len(array)]
            first += len(array)
        table = self.host_block_table(num_seqs, num_columns)
        end = first + table.size
        table[:] = values[first:end].reshape(table.shape)
        if self.adapters is not None:
            self.adapters.clear()
            if len(values) > end:
                self.adapters.fill_rows(values[end:], self.host.outputs[:num_outputs])
        self.commit(num_tokens, num_seqs, num_outputs)

    def _filled(self, num_tokens: int, num_seqs: int, num_outputs: int) -> list[np.ndarray]:
        """The filled parts of the engine's arrays, except the block table."""
        host = self.host
        of_tokens = [array[:num_tokens] for array in (host.token_ids, host.positions, *host.slots)]
        of_seqs = [array[:num_seqs] for array in (host.context_len, host.is_reversed)]
        return [*of_tokens, *of_seqs, host.outputs[:num_outputs], host.query_start[: num_seqs + 1]]

    def struct(self) -> Step:
        """Returns the struct that describes steps to the CPU's programs. `describe` sets what differs among steps."""
        return Step(
            positions=self.positions.data_ptr(),
            slots=self.slots.data_ptr(),
            slots_stride=self.slots.stride(0),
            query_start=self.query_start.data_ptr(),
            context_len=self.context_len.data_ptr(),
            is_reversed=self.is_reversed.data_ptr(),
            block_table=self.flat_block_table.data_ptr(),
            block_table_stride=self.num_groups * self.max_blocks_per_seq,
            group_table_stride=self.max_blocks_per_seq,
        )

    def host_struct(self, group: int, num_seqs: int) -> Step:
        """Returns the struct of the first sequences, with the host's buffers and the blocks of one layer group."""
        host = self.host
        return Step(
            query_start=host.query_start.ctypes.data,
            positions=host.positions.ctypes.data,
            is_reversed=host.is_reversed.ctypes.data,
            block_table=host.block_table[group * self.num_columns :].ctypes.data,
            block_table_stride=self.num_groups * self.num_columns,
            num_seqs=num_seqs,
        )

    def describe(self, struct: Step) -> None:
        struct.num_tokens, struct.num_seqs = self.num_tokens, self.num_seqs
        struct.num_rows, struct.rows = self.num_outputs, self.outputs.data_ptr()
        if self.kept_inputs is not None:
            self.kept_inputs.describe(struct)
        adapters = self.adapters if self.has_adapters else None
        struct.adapters = adapters.tokens.data_ptr() if adapters else None
        struct.row_adapters = adapters.outputs.data_ptr() if adapters else None

    def upload(self) -> None:
        """Sends the host's buffers to the device, on the current stream. They must not change until
        `wait_until_sent`."""
        if self._sent is not None:
            self.send(self._host_buffer, self._device_buffer)
            if self.kept_inputs is not None:
                self.kept_inputs.upload()
            if self.adapters is not None:
                self.adapters.upload()
        # Also on a CPU, where plans are memory of their own.
        if self.shared_plans is not None:
            self.shared_plans.upload()

    def mark_sent(self) -> None:
        """Records that the copy of the buffers has been launched."""
        if self._sent is not None:
            self._sent.record()

    def wait_until_sent(self) -> None:
        """Waits until the host's buffers may be filled again."""
        if self._sent is not None:
            self._sent.synchronize()

    def _copy(self, host: torch.Tensor, device: torch.Tensor) -> None:
        used = int(self.host.num_used[0])
        device[:used].copy_(host[:used], non_blocking=True)


def _places(sizes: dict[str, int]) -> dict[str, slice]:
    """The places of the parts. Each begins at a multiple of 16 bytes, which kernels are compiled for."""
    places, begin = {}, 0
    for name, size in sizes.items():
        places[name] = slice(begin, begin + size)
        begin += _aligned(size)
    return places


def _aligned(size: int) -> int:
    return -(-size // 4) * 4
