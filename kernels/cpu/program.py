"""A list of operations that the library runs in one call, and the buffers between them."""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from enum import IntEnum
from itertools import pairwise
from typing import Any

import torch

from alignedserve.kernels.cpu.library import library
from alignedserve.kernels.cpu.structs import DTYPE_CODES, Op, OpKind, Step


class Buffers:
    """Activations [num_rows, width]. A buffer is reused once no `Value` refers to it.

    Rows are padded with zeros that no operation overwrites, because a matrix product reads whole words. A buffer is
    therefore reused only at the same width.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free: defaultdict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def allocate(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        free = self._free[width, dtype]
        return (
            free.pop() if free else torch.zeros(self.num_rows, _stride(width, dtype), dtype=dtype)[:, :width]
        )

    def release(self, tensor: torch.Tensor) -> None:
        self._free[tensor.shape[1], tensor.dtype].append(tensor)


def _stride(width: int, dtype: torch.dtype) -> int:
    """Returns a number of whole cache lines that is no multiple of 4 KB. Rows that far apart would share a few lines
    of L1."""
    line, page = 64 // dtype.itemsize, 4096 // dtype.itemsize
    stride = -(-width // line) * line
    return stride + line if stride % page == 0 else stride


class Rows(IntEnum):
    """The meaning of a value's rows."""

    TOKENS = 0
    # The step's `rows`.
    OUTPUTS = 1
    # Tokens with K and V to restore.
    RESTORED = 2


class Value:
    """The result of an operation of a program. Its buffer is free again once this object is collected."""

    def __init__(self, buffers: Buffers, width: int, dtype: torch.dtype, rows: Rows) -> None:
        self.buffers = buffers
        self.rows = rows
        self.tensor = buffers.allocate(width, dtype)

    def __del__(self) -> None:
        if hasattr(self, "tensor"):
            self.buffers.release(self.tensor)

    @property
    def width(self) -> int:
        return self.tensor.shape[1]

    @property
    def stride(self) -> int:
        return self.tensor.stride(0)

    @property
    def pointer(self) -> int:
        return self.tensor.data_ptr()


# Argument fields of operations without a field of their own name.
_FIELDS = {
    OpKind.WRITE_KV: "attention",
    OpKind.RESTORE_KV: "attention",
    OpKind.WRITE_INPUTS: "inputs",
    OpKind.READ_INPUTS: "inputs",
    OpKind.GROUP: "route",
    OpKind.MIX: "spread",
    OpKind.MEET: "share",
}


def field_of(kind: OpKind) -> str:
    """The name of an operation's arguments in `Op.args`."""
    return _FIELDS.get(kind, kind.name.lower())


class Program:
    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._array: Any = None
        # The weights, buffers and tables that the operations point to.
        self._kept: list[object] = []

    def append(
        self, kind: OpKind, dtype: torch.dtype, args: ctypes.Structure, out: Value, keep: list[object]
    ) -> None:
        op = Op(kind=kind, dtype=DTYPE_CODES[str(dtype).removeprefix("torch.")], of_rows=out.rows)
        setattr(op.args, field_of(kind), args)
        self._ops.append(op)
        self._kept += [kept.tensor if isinstance(kept, Value) else kept for kept in [*keep, out]]
        self._array = None

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(self._ops)

    def make_last_float32(self, value: Value) -> torch.Tensor:
        """Makes the last operation, a linear layer that yields `value`, write float32. Returns that tensor."""
        last = self._ops[-1]
        joins = last.kind == OpKind.JOIN_RANKS
        args = last.args.join_ranks if joins else last.args.linear
        if not (joins or last.kind == OpKind.LINEAR) or args.out != value.pointer:
            raise ValueError("logits must be the result of a linear layer")
        out = torch.zeros(value.buffers.num_rows, value.width, dtype=torch.float32)
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        if not joins:
            args.float32_out = 1
        self._kept.append(out)
        return out

    def profile(self, step: Step) -> list[float]:
        """Runs the program. Returns the seconds of each operation, including the time that threads wait."""
        ended_ns = (ctypes.c_int64 * len(self._ops))()
        step.ended_ns = ctypes.addressof(ended_ns)
        begin_ns = time.monotonic_ns()
        try:
            self.run(step)
        finally:
            step.ended_ns = None
        times = [begin_ns, *ended_ns]
        return [(end - begin) * 1e-9 for begin, end in pairwise(times)]

    def run(self, step: Step) -> None:
        if self._array is None:
            self._array = (Op * len(self._ops))(*self._ops)
        if library().run_program(self._array, len(self._ops), ctypes.addressof(step)) != 0:
            raise ValueError(f"a program of {len(self._ops)} ops over {step.num_tokens} tokens is too large")
