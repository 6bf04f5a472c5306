"""Memory of this process for the KV of preempted requests.

It has the maximum size from the start. Pages cost nothing until they are written.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from alignedserve.kv.format import BlockFormat
from alignedserve.types import PoolBlockId

# Lets the mapping exceed the available memory. Some versions of `mmap` lack the constant.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class SwapMemory:
    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        memory = np.frombuffer(mmap.mmap(-1, num_blocks * block_bytes, flags=flags), dtype=np.uint8)
        self.blocks: NDArray[np.uint8] = memory.reshape(num_blocks, block_bytes)
        # A stack, so that blocks with allocated pages are reused first.
        self._free = [PoolBlockId(block) for block in reversed(range(num_blocks))]

    @property
    def num_used(self) -> int:
        return len(self.blocks) - len(self._free)

    def allocate(self, count: int) -> list[PoolBlockId]:
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks of host memory for KV, but {len(self._free)} are free")
        taken = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        return taken

    def free(self, blocks: list[PoolBlockId]) -> None:
        self._free.extend(reversed(blocks))


@contextmanager
def scratch_blocks(form: BlockFormat, num_blocks: int) -> Iterator[NDArray[np.uint8]]:
    """Yields memory for KV like that of an instance without a router."""
    yield SwapMemory(num_blocks, form.column_bytes).blocks
