"""Copies of runs of blocks between a KV cache and the pool's memory, on the thread that calls.

On a CPU it is a plain copy that holds no lock of Python's and takes no thread of torch's (whose own copy would call its
whole pool to it, and wait for cores that compute is using). On a GPU it is a copy on a stream of its own, out of or
into pinned memory; it starts when the work that was queued at `mark` is through.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from alignedserve.transport import cuda
from alignedserve.transport.runs import Run


class Copier(Protocol):
    def mark(self) -> torch.cuda.Event | None:
        """On the thread that computes: a copy made after this mark comes after all that was computed before it."""

    def begin(self, mark: torch.cuda.Event | None) -> None: ...

    def save(self, run: Run) -> None:
        """From the cache to the pool; `run.here` counts the cache's blocks."""

    def load(self, run: Run) -> None: ...

    def finish(self) -> None:
        """Returns when all copies since `begin` are made."""

    def close(self) -> None: ...


def make_copier(blocks: torch.Tensor, pool: NDArray[np.uint8]) -> Copier:
    block_bytes = blocks[0].numel() * blocks.element_size()
    if pool.shape[1:] != (block_bytes,):
        raise RuntimeError(
            f"blocks of {block_bytes} bytes in the cache, of shape {pool.shape[1:]} in the pool"
        )
    return CudaCopier(blocks, pool) if blocks.is_cuda else HostCopier(blocks, pool)


def as_bytes(blocks: torch.Tensor) -> torch.Tensor:
    """[num_blocks, block_bytes]"""
    return blocks.view(len(blocks), -1).view(torch.uint8)


class HostCopier:
    def __init__(self, blocks: torch.Tensor, pool: NDArray[np.uint8]) -> None:
        self._cache: NDArray[np.uint8] = as_bytes(blocks).numpy()
        self._pool = pool

    def mark(self) -> None:
        return None

    def begin(self, mark: torch.cuda.Event | None) -> None:
        return None

    def save(self, run: Run) -> None:
        here, there, num = run
        np.copyto(self._pool[there : there + num], self._cache[here : here + num])

    def load(self, run: Run) -> None:
        here, there, num = run
        np.copyto(self._cache[here : here + num], self._pool[there : there + num])

    def finish(self) -> None:
        return None

    def close(self) -> None:
        return None


class CudaCopier:
    def __init__(self, blocks: torch.Tensor, pool: NDArray[np.uint8]) -> None:
        self._cache = as_bytes(blocks)
        self._pinned = pool
        self._pool = torch.from_numpy(pool)
        self._stream = cuda.new_stream(blocks.device)
        cuda.pin(pool)

    def mark(self) -> torch.cuda.Event:
        return cuda.record(torch.cuda.current_stream(self._cache.device))

    def begin(self, mark: torch.cuda.Event | None) -> None:
        assert mark is not None
        self._stream.wait_event(mark)

    def save(self, run: Run) -> None:
        here, there, num = run
        with torch.cuda.stream(self._stream):
            self._pool[there : there + num].copy_(self._cache[here : here + num], non_blocking=True)

    def load(self, run: Run) -> None:
        here, there, num = run
        with torch.cuda.stream(self._stream):
            self._cache[here : here + num].copy_(self._pool[there : there + num], non_blocking=True)

    def finish(self) -> None:
        cuda.record(self._stream).synchronize()

    def close(self) -> None:
        cuda.unpin(self._pinned)
