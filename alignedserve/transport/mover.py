"""The transport `host`: copies blocks between an instance's KV cache and the pool's memory while the instance computes.

One thread (on a GPU, one per direction) carries out transfers in the order of their starts, urgent ones first. Before
each piece it checks the deadline, and whether the transfer was abandoned. So a stopped transfer writes at
most one more piece.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from alignedserve.kv.format import BlockFormat
from alignedserve.transport.block_checks import BlockChecks, Checked
from alignedserve.transport.completions import Completions, Done, Outcome, TransferId, TransferIds
from alignedserve.transport.copiers import (
    DIRECTIONS,
    Copier,
    CudaCopier,
    Direction,
    HostCopier,
    PartsCopier,
    PinningCopier,
)
from alignedserve.transport.runs import Pairs, Run, Tail, check_blocks, merge, tail_of
from alignedserve.types import Epoch, PoolBlockId, RequestKey

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 30.0
# Priorities in a lane's queue.
_URGENT, _PLAIN, _LAST = range(3)


@dataclass
class _CopyJob:
    transfer: TransferId
    what: Direction
    key: RequestKey
    runs: list[Run]
    tail: Tail | None
    # The copy waits for the work before this mark.
    mark: torch.cuda.Event | None
    deadline_s: float
    done: Done
    stop_reason: str | None = None


@dataclass(frozen=True)
class PoolBlocks:
    # One per block.
    rows: NDArray[np.uint8]
    # None: that of the cache.
    form: BlockFormat | None = None
    checks: BlockChecks | None = None


class Mover:
    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        pool: PoolBlocks,
        epoch: Epoch,
        completions: Completions,
        clock: Callable[[], float] = time.monotonic,
        num_threads: int = 2,
        quick_bytes: int = 0,
    ) -> None:
        """`parts`: the cache's blocks, per rank. Transfers of less than `quick_bytes` of the cache run on the thread
        that starts them."""
        self._copier = make_copier(parts, pool, num_threads)
        self._pool_format = pool.form
        self._num_blocks, (self._num_pool_blocks, self._block_bytes) = len(parts[0]), pool.rows.shape
        words = np.zeros(self._num_pool_blocks, np.uint64)
        self._checks = pool.checks or BlockChecks(pool.rows, words, share=0.0)
        self._cache_block_bytes = sum(part[0].nbytes for part in parts)
        self._ids = TransferIds(epoch)
        self._completions = completions
        self._clock = clock
        self._quick_bytes = quick_bytes
        self._pending: dict[TransferId, _CopyJob] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._lanes = [_Lane(self._carry_out) for _ in range(self._copier.num_lanes)]

    def save(
        self,
        key: RequestKey,
        pairs: Pairs,
        done: Done,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        is_urgent: bool = False,
        num_empty: int = 0,
    ) -> TransferId:
        """Copies cache blocks to pool blocks, after all work that was queued before this call. `num_empty`: empty slots
        in the blocks of the last column; all other blocks are full."""
        tail, form = None, self._pool_format
        if form is not None:
            tail = tail_of(pairs, num_empty, form.block_size, form.num_groups)
        return self._start("save", key, pairs, done, timeout_s, is_urgent, tail)

    def load(
        self,
        key: RequestKey,
        pairs: Pairs,
        done: Done,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        is_urgent: bool = False,
    ) -> TransferId:
        """Copies pool blocks to cache blocks."""
        return self._start("load", key, pairs, done, timeout_s, is_urgent)

    def abandon(self, key: RequestKey) -> None:
        """Stops the request's transfers at their next piece. Each still ends with an outcome. Safe to repeat."""
        with self._lock:
            self._stop([job for job in self._pending.values() if job.key == key], "abandoned")

    def close(self) -> None:
        """Stops all transfers. Their outcomes stay in `completions`. Safe to repeat."""
        with self._lock:
            self._stop(list(self._pending.values()), "the mover was closed")
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            for lane in self._lanes:
                lane.close()
            self._copier.close()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def _start(
        self,
        what: Direction,
        key: RequestKey,
        pairs: Pairs,
        done: Done,
        timeout_s: float,
        is_urgent: bool,
        tail: Tail | None = None,
    ) -> TransferId:
        check_blocks((here for here, _ in pairs), self._num_blocks, "the KV cache")
        check_blocks((there for _, there in pairs), self._num_pool_blocks, "the pool")
        job = _CopyJob(
            transfer=self._ids.next(),
            what=what,
            key=key,
            runs=merge(pairs, self._cache_block_bytes),
            tail=tail,
            mark=self._copier.mark(),
            deadline_s=self._clock() + timeout_s,
            done=done,
        )
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{what} of request {key}: the mover is closed")
            self._pending[job.transfer] = job
        if len(pairs) * self._cache_block_bytes < self._quick_bytes:
            self._carry_out(job)
            return job.transfer
        self._lanes[DIRECTIONS.index(what) % len(self._lanes)].put(job, is_urgent)
        return job.transfer

    @staticmethod
    def _stop(jobs: list[_CopyJob], reason: str) -> None:
        for job in jobs:
            job.stop_reason = reason

    def _carry_out(self, job: _CopyJob) -> None:
        begun_s, checked = time.perf_counter(), Checked()
        try:
            checked = self._copy(job, lambda: self._reason_to_stop(job) is not None)
            error = self._reason_to_stop(job)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        with self._lock:
            del self._pending[job.transfer]
        num_bytes = sum(run.num_blocks for run in job.runs) * self._block_bytes
        took_s = time.perf_counter() - begun_s
        outcome = Outcome(job.transfer, job.what, (job.key,), error, num_bytes, took_s)
        if checked.num_blocks or checked.wrong:
            outcome = self._with_checks(outcome, checked)
        self._completions.post(job.done, outcome)

    def _copy(self, job: _CopyJob, is_stopped: Callable[[], bool]) -> Checked:
        is_save, drawn = job.what == "save", dict[int, int]()
        if is_save:
            self._checks.clear(job.runs)
        else:
            drawn = self._checks.draw(job.runs, job.transfer.number)
        self._copier.copy(job.what, job.runs, job.mark, is_stopped, job.tail)
        if is_save:
            self._checks.store(job.runs, is_stopped)
        return self._checks.check(drawn, is_stopped)

    def _with_checks(self, outcome: Outcome, checked: Checked) -> Outcome:
        num_groups = self._pool_format.num_groups if self._pool_format else 1
        for block in checked.changed:
            logger.warning(
                "Block %d of the KV pool has changed since it was saved: it is computed again",
                block // num_groups,
            )
        wrong = [PoolBlockId(block // num_groups) for block in checked.wrong]
        return replace(
            outcome,
            error=f"pool block {wrong[0]} is not as it was saved" if wrong else outcome.error,
            num_checked=checked.num_blocks,
            num_changed=len(checked.changed),
            wrong_block=wrong[0] if wrong else None,
        )

    def _reason_to_stop(self, job: _CopyJob) -> str | None:
        if job.stop_reason is None and self._clock() >= job.deadline_s:
            job.stop_reason = "its deadline passed"
        return job.stop_reason


class _Lane:
    """A thread and its jobs: urgent ones first, others in order."""

    def __init__(self, carry_out: Callable[[_CopyJob], None]) -> None:
        self._jobs: queue.PriorityQueue[tuple[int, int, _CopyJob | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._carry_out = carry_out
        self._thread = threading.Thread(target=self._run, name="mover", daemon=True)
        self._thread.start()

    def put(self, job: _CopyJob, is_urgent: bool) -> None:
        self._jobs.put((_URGENT if is_urgent else _PLAIN, next(self._numbers), job))

    def _run(self) -> None:
        while (job := self._jobs.get()[-1]) is not None:
            self._carry_out(job)

    def close(self) -> None:
        """Returns when all queued jobs are done or stopped."""
        self._jobs.put((_LAST, next(self._numbers), None))
        self._thread.join()


def make_copier(parts: Sequence[torch.Tensor], pool: PoolBlocks, num_threads: int = 1) -> Copier:
    """`parts`: the blocks per rank."""
    make, part_bytes, where = _plain_copier, parts[0][0].nbytes, "in the cache"
    if pool.form is not None and pool.form.encoding == "kv-int8":
        # Imported here because plain copies need no kernel.
        from alignedserve.kernels.kv_int8 import stored_bytes
        from alignedserve.transport.int8_copiers import make_int8_copier

        make, part_bytes, where = make_int8_copier, stored_bytes(parts[0]), "when stored as int8"
    rows = pool.rows
    if rows.shape[1:] != (len(parts) * part_bytes,):
        raise RuntimeError(
            f"blocks of {len(parts) * part_bytes} bytes {where}, of shape {rows.shape[1:]} in the pool"
        )
    pieces = [rows[:, first : first + part_bytes] for first in range(0, rows.shape[1], part_bytes)]
    copiers = [make(part, piece, num_threads) for part, piece in zip(parts, pieces, strict=True)]
    copier = copiers[0] if len(copiers) == 1 else PartsCopier(copiers, rows.shape[1])
    return PinningCopier(copier, rows) if parts[0].is_cuda else copier


def _plain_copier(blocks: torch.Tensor, pool: NDArray[np.uint8], num_threads: int) -> Copier:
    if blocks.is_cuda:
        return CudaCopier(blocks, pool.ctypes.data, pool.strides[0])
    return HostCopier(blocks, pool, num_threads)
