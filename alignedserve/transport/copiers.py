"""Copies of runs of blocks between a KV cache and the memory of another process: the pool, or a sender (`ipc.py`).

On a CPU it is a plain copy that holds no lock of Python's and takes no thread of torch's (whose own copy would use its
whole pool, and wait for cores that compute is using). One core gets little more than half of the memory's bandwidth,
so two share a transfer's copies; there is one transfer at a time.

On a GPU each direction has a stream and a copy engine of its own, so both go on at the same time. Copies are queued in
groups, in one call of the driver's each: a call per block would take the interpreter's lock 50,000 times a second from
the thread that decodes. Two groups are under way at most, so that a transfer that is to stop does so soon.

Of an instance of several ranks each has a part of every block, in memory of its own. In the pool they are one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from alignedserve.protocol.kv_format import BlockFormat
from alignedserve.transport import cuda
from alignedserve.transport.runs import Run, Tail

Direction = Literal["save", "load"]
DIRECTIONS: tuple[Direction, Direction] = ("save", "load")

# The bytes that are queued on a GPU in one call: at 50 GB/s, little more than a millisecond.
GROUP_BYTES = 64 << 20
# The bytes that one thread copies in less time than it takes to wake another.
ALONE_BYTES = 1 << 20


class Copier(Protocol):
    # With 2 lanes save and load may be called at the same time, on threads of their own; with 1, one after the other.
    num_lanes: int

    def mark(self) -> torch.cuda.Event | None:
        """Returns a mark, called by the thread that computes. A copy which waits for the mark comes after all work
        before it."""

    def copy(
        self,
        direction: Direction,
        runs: Sequence[Run],
        mark: torch.cuda.Event | None,
        is_stopped: Callable[[], bool],
        tail: Tail | None = None,
    ) -> None:
        """Copies from the cache to the pool, or back; `run.here` counts the cache's blocks. `tail`: the blocks of a
        save which are filled in part.

        `is_stopped` is asked before each piece, and may raise. Returns, or raises, when no copy is under way any more.
        """

    def close(self) -> None: ...


def make_copier(
    parts: Sequence[torch.Tensor],
    pool: NDArray[np.uint8],
    num_threads: int = 1,
    pool_format: BlockFormat | None = None,
) -> Copier:
    """`parts`: the blocks of each rank. `pool_format`: of the pool's blocks; None if they are as the cache's."""
    make, part_bytes, where = _plain_copier, parts[0][0].nbytes, "in the cache"
    if pool_format is not None and pool_format.encoding == "kv-int8":
        # It is imported where it is needed: few need a kernel to copy blocks.
        from alignedserve.kernels.kv_int8 import stored_bytes
        from alignedserve.transport.int8_copiers import make_int8_copier

        make, part_bytes, where = make_int8_copier, stored_bytes(parts[0]), "when stored as int8"
    if pool.shape[1:] != (len(parts) * part_bytes,):
        raise RuntimeError(
            f"blocks of {len(parts) * part_bytes} bytes {where}, of shape {pool.shape[1:]} in the pool"
        )
    pieces = [pool[:, first : first + part_bytes] for first in range(0, pool.shape[1], part_bytes)]
    copiers = [make(part, piece, num_threads) for part, piece in zip(parts, pieces, strict=True)]
    copier = copiers[0] if len(copiers) == 1 else PartsCopier(copiers, pool.shape[1])
    return PinningCopier(copier, pool) if parts[0].is_cuda else copier


def _plain_copier(blocks: torch.Tensor, pool: NDArray[np.uint8], num_threads: int) -> Copier:
    if blocks.is_cuda:
        return CudaCopier(blocks, pool.ctypes.data, pool.strides[0])
    return HostCopier(blocks, pool, num_threads)


def as_bytes(blocks: torch.Tensor) -> torch.Tensor:
    """A view of the blocks as bytes, of shape [num_blocks, block_bytes]."""
    return blocks.view(len(blocks), -1).view(torch.uint8)


class HostCopier:
    num_lanes = 1

    def __init__(self, blocks: torch.Tensor, pool: NDArray[np.uint8], num_threads: int = 1) -> None:
        self._cache: NDArray[np.uint8] = as_bytes(blocks).numpy()
        self._pool = pool
        self._num_threads = num_threads
        self._helpers = ThreadPoolExecutor(num_threads, thread_name_prefix="mover-copies")

    def mark(self) -> None:
        return None

    def copy(
        self,
        direction: Direction,
        runs: Sequence[Run],
        mark: torch.cuda.Event | None,
        is_stopped: Callable[[], bool],
        tail: Tail | None = None,
    ) -> None:
        if sum(run.num_blocks for run in runs) * self._pool.shape[1] <= ALONE_BYTES:
            self._copy(direction, runs, is_stopped, tail)
            return
        shares = [runs[first :: self._num_threads] for first in range(self._num_threads)]
        copies = [
            self._helpers.submit(self._copy, direction, share, is_stopped, tail) for share in shares if share
        ]
        wait(copies)
        # The futures are removed one by one: an error that leaves this call must not refer to what refers to it.
        while copies:
            copies.pop().result()

    def _copy(
        self, direction: Direction, runs: Sequence[Run], is_stopped: Callable[[], bool], tail: Tail | None
    ) -> None:
        for run in runs:
            if is_stopped():
                return
            if direction == "save":
                self.save(run, tail)
            else:
                self.load(run)

    def save(self, run: Run, tail: Tail | None = None) -> None:
        here, there, num = run
        np.copyto(self._pool[there : there + num], self._cache[here : here + num])

    def load(self, run: Run) -> None:
        here, there, num = run
        np.copyto(self._cache[here : here + num], self._pool[there : there + num])

    def close(self) -> None:
        self._helpers.shutdown()


class CudaCopier:
    """The other memory is at an address that the cache's GPU can reach."""

    num_lanes = 2

    def __init__(self, blocks: torch.Tensor, address: int, pitch: int | None = None) -> None:
        """`pitch`: the bytes from one block of the other memory to the next, if they don't follow each other."""
        self._cache = as_bytes(blocks)
        self._address = address
        self._pitch = pitch or self._cache.shape[1]
        self._streams = {direction: cuda.new_stream(blocks.device) for direction in DIRECTIONS}
        self._copies = cuda.Copies()

    def mark(self) -> torch.cuda.Event:
        return cuda.record(torch.cuda.current_stream(self._cache.device))

    def copy(
        self,
        direction: Direction,
        runs: Sequence[Run],
        mark: torch.cuda.Event | None,
        is_stopped: Callable[[], bool],
        tail: Tail | None = None,
    ) -> None:
        stream = self._streams[direction]
        with torch.cuda.device(self._cache.device):
            if mark is not None:
                stream.wait_event(mark)
            try:
                self._copy_groups(direction, runs, stream, is_stopped, tail)
            finally:
                cuda.record(stream).synchronize()

    def _copy_groups(
        self,
        direction: Direction,
        runs: Sequence[Run],
        stream: torch.cuda.Stream,
        is_stopped: Callable[[], bool],
        tail: Tail | None,
    ) -> None:
        before: torch.cuda.Event | None = None
        for group in groups(runs, self._cache.shape[1]):
            if is_stopped():
                return
            self._queue(direction, group, stream, tail)
            queued = cuda.record(stream)
            if before is not None:
                before.synchronize()
            before = queued

    def _queue(
        self, direction: Direction, runs: Sequence[Run], stream: torch.cuda.Stream, tail: Tail | None
    ) -> None:
        here, there, num_blocks = np.array(runs, np.uint64).T
        num_bytes = num_blocks * np.uint64(self._cache.shape[1])
        here = here * np.uint64(self._cache.shape[1]) + np.uint64(self._cache.data_ptr())
        there = there * np.uint64(self._pitch) + np.uint64(self._address)
        targets, sources = (there, here) if direction == "save" else (here, there)
        self._copies.queue(targets, sources, num_bytes, stream)

    def close(self) -> None:
        pass


class PartsCopier:
    """Copies the parts of blocks, each between memories of its own, at the same time if they are large."""

    def __init__(self, copiers: Sequence[Copier], block_bytes: int) -> None:
        """`block_bytes`: of all parts of a block together."""
        self._copiers = copiers
        self._block_bytes = block_bytes
        self.num_lanes = copiers[0].num_lanes
        # Each lane may have a copy under way.
        num_threads = self.num_lanes * len(copiers)
        self._helpers = ThreadPoolExecutor(num_threads, thread_name_prefix="mover-parts")

    def mark(self) -> torch.cuda.Event | None:
        """Ranks meet in each step after they have written their KV, so what is behind the first one's work is behind
        that of all."""
        return self._copiers[0].mark()

    def copy(
        self,
        direction: Direction,
        runs: Sequence[Run],
        mark: torch.cuda.Event | None,
        is_stopped: Callable[[], bool],
        tail: Tail | None = None,
    ) -> None:
        # Of a block of the pool a part is one piece, but not of several.
        each = [Run(run.here + i, run.there + i, 1) for run in runs for i in range(run.num_blocks)]
        if len(each) * self._block_bytes <= ALONE_BYTES:
            for copier in self._copiers:
                copier.copy(direction, each, mark, is_stopped, tail)
            return
        copies = [
            self._helpers.submit(copier.copy, direction, each, mark, is_stopped, tail)
            for copier in self._copiers
        ]
        wait(copies)
        # See HostCopier.copy.
        while copies:
            copies.pop().result()

    def close(self) -> None:
        self._helpers.shutdown()
        for copier in self._copiers:
            copier.close()


class PinningCopier:
    """Keeps the pool's memory pinned for a copier."""

    def __init__(self, copier: Copier, pool: NDArray[np.uint8]) -> None:
        self._copier = copier
        self._pool = pool
        self.num_lanes = copier.num_lanes
        self.mark, self.copy = copier.mark, copier.copy
        cuda.pin(pool)

    def close(self) -> None:
        self._copier.close()
        cuda.unpin(self._pool)


def groups(runs: Sequence[Run], block_bytes: int) -> Iterator[Sequence[Run]]:
    """Groups of runs that have about GROUP_BYTES together. Each run is in one group, in order."""
    first = num_blocks = 0
    for index, run in enumerate(runs):
        num_blocks += run.num_blocks
        if num_blocks * block_bytes >= GROUP_BYTES or index == len(runs) - 1:
            yield runs[first : index + 1]
            first, num_blocks = index + 1, 0
