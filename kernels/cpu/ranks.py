"""The memory in which the ranks of an instance on one host exchange rows: see csrc/ranks.cpp."""

from __future__ import annotations

import ctypes

import torch

from alignedserve.kernels.cpu.structs import Ranks

_LINE_BYTES, _PAGE_BYTES = 64, 4096
# A slot's rows are padded to whole vectors.
_LANES = 16


class RanksBroken(RuntimeError):
    """Another rank has ended or hangs. The current result is void, and nothing can be computed any more."""


def padded(width: int) -> int:
    """The number of values that a row of this width takes in a slot."""
    return -(-width // _LANES) * _LANES


def num_shared_bytes(size: int, slot_values: int) -> int:
    """Bytes shared by `size` ranks that exchange at most `slot_values` values of padded rows at a time."""
    return _header_bytes(size) + 2 * size * _slot_bytes(slot_values)


def _header_bytes(size: int) -> int:
    return -(-(size + 1) * _LINE_BYTES // _PAGE_BYTES) * _PAGE_BYTES


def _slot_bytes(slot_values: int) -> int:
    return -(-slot_values * 4 // _PAGE_BYTES) * _PAGE_BYTES


class RankMemory:
    """One rank's view of the shared memory, which must be zeroed at first."""

    def __init__(self, shared: torch.Tensor, rank: int, size: int, slot_values: int) -> None:
        """`shared`: the bytes, mapped by each rank."""
        needed = num_shared_bytes(size, slot_values)
        if shared.dtype != torch.uint8 or shared.numel() != needed or not 0 <= rank < size:
            raise ValueError(
                f"rank {rank} of {size} must share {needed} bytes, not {shared.numel()} of {shared.dtype}"
            )
        self._shared = shared
        self._slot_values = slot_values
        self._broken = shared[size * _LINE_BYTES :][:8].view(torch.int64)
        self.struct = Ranks(shared.data_ptr(), rank, size, _slot_bytes(slot_values), 0)

    @property
    def pointer(self) -> int:
        return ctypes.addressof(self.struct)

    def check_fits(self, num_rows: int, width: int) -> None:
        if num_rows * padded(width) > self._slot_values:
            raise ValueError(
                f"{num_rows} rows of {width} values do not fit the {self._slot_values} that ranks exchange"
            )

    def break_up(self) -> None:
        """Makes every wait for another rank return at once, now and later. Safe to repeat, on any thread."""
        self._broken.fill_(1)

    def check(self) -> None:
        """Raises RanksBroken if `break_up` was called by any rank."""
        if self._broken.item():
            raise RanksBroken("a rank of this instance has ended or hangs")
