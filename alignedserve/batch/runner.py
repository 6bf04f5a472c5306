"""A gateway's share of the batch jobs: it looks which there are, takes those that nobody holds, and works on them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable

from alignedserve.batch.config import BatchConfig
from alignedserve.batch.job_run import Ask, JobRun, Shared
from alignedserve.batch.room import Room
from alignedserve.store import JobId, Lease, LeaseLost, Store, StoreAway

log = logging.getLogger(__name__)


class BatchRunner:
    def __init__(
        self,
        store: Store,
        ask: Ask,
        served_model: str,
        owner: str,
        config: BatchConfig | None = None,
        on_late: Callable[[], None] = lambda: None,
    ) -> None:
        """`owner`: for people to read; `on_late` hears of each line that was not answered in time."""
        config = config or BatchConfig()
        self._store = store
        self._owner = owner
        self._config = config
        self._shared = Shared(
            store,
            ask,
            served_model,
            config,
            Room(config.max_num_lines, config.max_bytes),
            asyncio.Semaphore(config.max_num_jobs),
            asyncio.Event(),
            on_late,
        )
        self._runs: dict[JobId, JobRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._patience_s = 0.0
        # jobs that are not over, by status, as last seen
        self.num_open_jobs: Counter[str] = Counter()

    def wake(self) -> None:
        """There is a new job."""
        self._wake.set()

    def cancel(self, job_id: JobId) -> None:
        """The store says that it is being cancelled; elsewhere that is seen at the next look."""
        if run := self._runs.get(job_id):
            run.cancel()

    def stop(self, patience_s: float) -> None:
        """No line begins any more; those that run get so long. What is not done then is done at the next start."""
        self._patience_s = patience_s
        self._shared.stopping.set()
        self._wake.set()

    async def run(self) -> None:
        """Until it is stopped."""
        try:
            while not self._shared.stopping.is_set():
                self._wake.clear()
                await self._look_if_possible()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._config.look_s)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=self._patience_s)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _look_if_possible(self) -> None:
        try:
            with contextlib.suppress(StoreAway):
                await self._look()
        except Exception:
            # ended by it, this gateway would take no job any more, and nobody would know
            log.exception("looking for jobs failed, and is tried again")

    async def _look(self) -> None:
        jobs = await self._store.open_jobs()
        self.num_open_jobs = Counter(job.status for job in jobs)
        for job in jobs:
            if job.id in self._runs:
                continue
            if lease := await self._store.acquire(job.id, self._owner, self._config.lease_s):
                task = asyncio.create_task(self._hold(lease))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        for file_id in await self._store.expired_files(time.time()):
            await self._store.delete_file(file_id)

    async def _hold(self, lease: Lease) -> None:
        """Works on the job, and renews the lease, until one of both ends."""
        run = self._runs[lease.job_id] = JobRun(self._shared, lease)
        work = asyncio.create_task(run.run())
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=self._config.look_s)
                if not work.done() and not await self._renew(lease, run):
                    break
        finally:
            work.cancel()
            await asyncio.wait({work})
            del self._runs[lease.job_id]
            # else it lapses: what went wrong now is not tried again at once
            if work.cancelled() or self._is_fine(work, lease):
                with contextlib.suppress(StoreAway):
                    await self._store.release(lease)

    async def _renew(self, lease: Lease, run: JobRun) -> bool:
        """False: it is lost. While the store is away nobody else can take it."""
        with contextlib.suppress(StoreAway):
            try:
                await self._store.renew(lease, self._config.lease_s)
            except LeaseLost:
                return False
            job = await self._store.job(lease.job_id)
            if job and job.status == "cancelling":
                run.cancel()
        return True

    @staticmethod
    def _is_fine(work: asyncio.Task[None], lease: Lease) -> bool:
        error = work.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error and not isinstance(error, LeaseLost):
            log.error("job %s failed, and is tried again", lease.job_id, exc_info=error)
        return error is None
