"""Copies between a KV cache and a pool with `kv-int8` blocks (`kv/format.py`). They quantise on save and
dequantise on load.

On a CPU, the kernel reads from one memory and writes to the other, on the threads that would copy. On a GPU, a kernel
works between the cache and a buffer in GPU memory, in the copies' stream, and the buffer crosses PCIe. Each direction
needs one buffer, because a kernel and its copies run in stream order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from alignedserve.kernels.cpu import kv_int8 as native
from alignedserve.kernels.cpu.build import BuildFailed, NoCompiler
from alignedserve.kernels.cpu.library import library
from alignedserve.kernels.kv_int8 import dequantise_torch, quantise_torch, stored_bytes
from alignedserve.transport import cuda
from alignedserve.transport.copiers import DIRECTIONS, Copier, CudaCopier, Direction, HostCopier
from alignedserve.transport.runs import Pairs, Run, Tail, pieces_of
from alignedserve.types import BlockId, PoolBlockId

logger = logging.getLogger(__name__)

Quantise = Callable[[torch.Tensor, torch.Tensor, int], None]
Dequantise = Callable[[torch.Tensor, torch.Tensor], None]

# Size of the buffer, in bytes of the pool's format. It limits the blocks that a GPU converts at once.
BUFFER_BYTES = 16 << 20


def make_int8_copier(blocks: torch.Tensor, pool: NDArray[np.uint8], num_threads: int) -> Copier:
    return Int8CudaCopier(blocks, pool) if blocks.is_cuda else Int8HostCopier(blocks, pool, num_threads)


class Int8HostCopier(HostCopier):
    def __init__(self, blocks: torch.Tensor, pool: NDArray[np.uint8], num_threads: int = 1) -> None:
        super().__init__(blocks, pool, num_threads)
        self._blocks, self._stored = blocks, torch.from_numpy(pool)
        self._quantise, self._dequantise = functions_for(blocks.dtype)

    def save(self, run: Run, tail: Tail | None = None) -> None:
        for (here, there, num), is_tail in pieces_of(run, tail):
            num_last_slots = tail.num_slots if is_tail and tail else self._blocks.shape[4]
            self._quantise(self._blocks[here : here + num], self._stored[there : there + num], num_last_slots)

    def load(self, run: Run) -> None:
        here, there, num = run
        self._dequantise(self._stored[there : there + num], self._blocks[here : here + num])


class Int8Buffer:
    """A device buffer for blocks in the pool's format. `pairs` correspond to its first blocks. The methods only queue
    work. `num_bytes` is the buffer's size; None means BUFFER_BYTES."""

    def __init__(self, blocks: torch.Tensor, num_bytes: int | None = None) -> None:
        # Triton is installed wherever there is a GPU.
        from alignedserve.kernels.triton.kv_int8 import dequantise, quantise

        self._quantise, self._dequantise = quantise, dequantise
        self._blocks = blocks
        block_bytes = stored_bytes(blocks)
        shape = (max(1, (num_bytes or BUFFER_BYTES) // block_bytes), block_bytes)
        self.stored = torch.empty(shape, dtype=torch.uint8, device=blocks.device)

    def quantise(self, pairs: Pairs, tail: Tail | None) -> None:
        # In one call, only the last block may be in the tail.
        ends = (
            [] if tail is None else [end for end, (_, there) in enumerate(pairs, start=1) if tail.has(there)]
        )
        num_slots = tail.num_slots if tail is not None else self._blocks.shape[4]
        here = self._here(pairs)
        for begin, end in pairwise((0, *ends, len(pairs))):
            if begin < end:
                number = end - begin - 1 if end in ends else -1
                self._quantise(self._blocks, here[begin:end], self.stored[begin:end], number, num_slots)

    def dequantise(self, pairs: Pairs) -> None:
        self._dequantise(self.stored[: len(pairs)], self._blocks, self._here(pairs))

    def _here(self, pairs: Pairs) -> torch.Tensor:
        numbers = torch.tensor([here for here, _ in pairs], dtype=torch.int64)
        if self._blocks.is_cuda:
            # Copying from unpinned memory would wait for all queued work.
            numbers = numbers.pin_memory()
        return numbers.to(self._blocks.device, non_blocking=True)


class Int8CudaCopier(CudaCopier):
    """At most two groups are in progress, as for plain copies."""

    def __init__(self, blocks: torch.Tensor, pool: NDArray[np.uint8]) -> None:
        super().__init__(blocks, pool.ctypes.data, pool.strides[0])
        self._block_bytes = pool.shape[1]
        self._buffers = {direction: Int8Buffer(blocks) for direction in DIRECTIONS}

    def _copy_groups(
        self,
        direction: Direction,
        runs: Sequence[Run],
        stream: torch.cuda.Stream,
        is_stopped: Callable[[], bool],
        tail: Tail | None,
    ) -> None:
        before: torch.cuda.Event | None = None
        buffer = self._buffers[direction]
        pairs = pairs_of(runs)
        for first in range(0, len(pairs), len(buffer.stored)):
            if is_stopped():
                return
            group = pairs[first : first + len(buffer.stored)]
            with torch.cuda.stream(stream):
                if direction == "save":
                    buffer.quantise(group, tail)
                self._copy_group(direction, group, stream)
                if direction == "load":
                    buffer.dequantise(group)
            queued = cuda.record(stream)
            if before is not None:
                before.synchronize()
            before = queued

    def _copy_group(self, direction: Direction, pairs: Pairs, stream: torch.cuda.Stream) -> None:
        block_bytes = np.uint64(self._block_bytes)
        begin = np.uint64(self._buffers[direction].stored.data_ptr())
        in_buffer = np.arange(len(pairs), dtype=np.uint64) * block_bytes + begin
        in_pool = np.array([there for _, there in pairs], np.uint64) * np.uint64(self._pitch)
        in_pool += np.uint64(self._address)
        targets, sources = (in_pool, in_buffer) if direction == "save" else (in_buffer, in_pool)
        self._copies.queue(targets, sources, np.full(len(pairs), block_bytes), stream)


def pairs_of(runs: Sequence[Run]) -> Pairs:
    return [
        (BlockId(run.here + i), PoolBlockId(run.there + i)) for run in runs for i in range(run.num_blocks)
    ]


def functions_for(dtype: torch.dtype) -> tuple[Quantise, Dequantise]:
    """Returns the kernel's functions if it can be built, otherwise the slow reference."""
    if native.is_native(dtype) and _can_build():
        return native.quantise, native.dequantise
    return quantise_torch, dequantise_torch


@cache
def _can_build() -> bool:
    try:
        library()
    except (NoCompiler, BuildFailed) as error:
        logger.warning("KV goes to the pool by plain torch, which is slower: %s", error)
        return False
    return True
