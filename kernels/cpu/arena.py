"""Memory for weights: zeroed, in huge pages if the operating system has them, and freed as a whole.

Reading 100 GB/s through 4 KB pages is limited by address translation. Weights are laid out in the order of their
allocation, which is the order in which a forward reads them. Prefetching past the end of one weight therefore loads the
next one.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch

_HUGE_PAGE = 2 << 20
_CHUNK = 64 << 20
_ALIGNMENT = 4096


class Arena:
    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Returns page-aligned memory as uint8. It is freed with the last tensor in its chunk."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > self._free.numel():
            self._free = _map_huge_pages(max(size, _CHUNK))
        taken, self._free = self._free[:num_bytes], self._free[size:]
        return taken


class SmallArena(Arena):
    """Maps no memory ahead, for what is soon copied elsewhere."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return _map_huge_pages(num_bytes)[:num_bytes]


def _map_huge_pages(size: int) -> torch.Tensor:
    size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # The operating system may have been built without huge pages.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=-address % _HUGE_PAGE)
