"""Copies runs of blocks between a KV cache and the memory of another process: the pool, or a sender (`ipc.py`).

On a CPU this is a plain copy that neither holds the GIL nor uses torch's threads (torch's own copy would use its whole
pool, and wait for busy cores). One core reaches little more than half of the memory's bandwidth, so two share a
transfer. There is one transfer at a time.

On a GPU each direction has a stream and a copy engine, so both run at the same time. Copies are queued in groups, with
one driver call each. A call per block would take the GIL 50,000 times a second from the thread that decodes. At most
two groups are in progress, so that a transfer stops soon.

With several ranks, each has a part of every block in its own memory. In the pool the parts are one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from alignedserve.transport import cuda
from alignedserve.transport.runs import Run, Tail

Direction = Literal["save", "load"]
DIRECTIONS: tuple[Direction, Direction] = ("save", "load")

# Bytes that are queued on a GPU in one call. At 50 GB/s they take little more than a millisecond.
GROUP_BYTES = 64 << 20
# Bytes that one thread copies faster than another thread wakes up.
ALONE_BYTES = 1 << 20


class Copier(Protocol):
    # With 2 lanes, save and load may be called at the same time on two threads; with 1, only one after the other.
    num_lanes: int

    def mark(self) -> torch.cuda.Event | None:
        """Returns a mark after all computation that this thread has queued. A copy can wait for it."""

    def copy(
        self,
        direction: Direction,
        runs: Sequence[Run],
        mark: torch.cuda.Event | None,
        is_stopped: Callable[[], bool],
        tail: Tail | None = None,
    ) -> None:
        """Copies from the cache to the pool, or back. `run.here` is in the cache's blocks. `tail`: the partly filled
        blocks of a save.

        `is_stopped` is called before each piece, and may raise. Returns or raises only after the last copy has ended.
        """

    def close(self) -> None: ...


def as_bytes(blocks: torch.Tensor) -> torch.Tensor:
    """Returns a view of the blocks as bytes, of shape [num_blocks, block_bytes]."""
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
        # Futures are removed one by one, so that a raised error does not form a reference cycle with this frame.
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
    """Copies between the cache and memory at an address that the cache's GPU can reach."""

    num_lanes = 2

    def __init__(self, blocks: torch.Tensor, address: int, pitch: int | None = None) -> None:
        """`pitch`: bytes from one block of the other memory to the next, if there are gaps."""
        self._cache = as_bytes(blocks)
        self._address = address
        self._pitch = pitch or self._cache.shape[1]
        self._streams = {direction: cuda.new_stream(blocks.device) for direction in DIRECTIONS}
        self._copies = cuda.DriverCopies()

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
    """Copies the parts of blocks, each between its own memories; at the same time if they are large."""

    def __init__(self, copiers: Sequence[Copier], block_bytes: int) -> None:
        """`block_bytes` is the sum over all parts of a block."""
        self._copiers = copiers
        self._block_bytes = block_bytes
        self.num_lanes = copiers[0].num_lanes
        # Each lane may have a copy in progress.
        num_threads = self.num_lanes * len(copiers)
        self._helpers = ThreadPoolExecutor(num_threads, thread_name_prefix="mover-parts")

    def mark(self) -> torch.cuda.Event | None:
        """Returns the first rank's mark. Ranks synchronise in each step after writing their KV, so it covers all
        ranks."""
        return self._copiers[0].mark()

    def copy(
        self,
        direction: Direction,
        runs: Sequence[Run],
        mark: torch.cuda.Event | None,
        is_stopped: Callable[[], bool],
        tail: Tail | None = None,
    ) -> None:
        # A part is contiguous within a block of the pool, but not across blocks.
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
    """Yields groups of consecutive runs of about GROUP_BYTES each, in order."""
    first = num_blocks = 0
    for index, run in enumerate(runs):
        num_blocks += run.num_blocks
        if num_blocks * block_bytes >= GROUP_BYTES or index == len(runs) - 1:
            yield runs[first : index + 1]
            first, num_blocks = index + 1, 0
