"""A gateway's part in batch jobs: it looks for jobs, takes as many as it has places for, and works on them.

A job is taken for one stage (store/base.py), and each stage has its own places. So files are validated and jobs
cancelled while others run for hours. Jobs beyond the places of all gateways cost nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence

from alignedserve.batch.concurrency_limit import ConcurrencyLimit
from alignedserve.batch.config import BatchConfig
from alignedserve.batch.forecast import JobForecast
from alignedserve.batch.inputs import Inputs
from alignedserve.batch.job_run import Ask, JobHooks, JobRun, Shared
from alignedserve.batch.loop_turns import LoopTurns
from alignedserve.batch.placed_inputs import PlacedInputs
from alignedserve.batch.reader import LineReader
from alignedserve.store import (
    STAGES,
    Contents,
    ContentsInStore,
    JobId,
    Lease,
    Stage,
    Store,
    StoreAway,
)
from alignedserve.store.leased_work import LeasedWork
from alignedserve.store.polling import StorePoller

log = logging.getLogger(__name__)


class BatchRunner:
    def __init__(
        self,
        store: Store,
        ask: Ask,
        served_models: Sequence[str],
        name: str,
        config: BatchConfig | None = None,
        hooks: JobHooks | None = None,
        contents: Contents | None = None,
    ) -> None:
        """`name` identifies the gateway to people. By default the content of files is in the store."""
        config = config or BatchConfig()
        self._store = store
        self._contents = contents = contents or ContentsInStore(store)
        self._name = name
        self._config = config
        self._places: Mapping[Stage, int] = {
            "validate": config.max_num_validating,
            "run": config.max_num_jobs,
            "end": config.max_num_ending,
        }
        self.forecast = JobForecast(store, config.max_num_jobs)
        self._shared = Shared(
            store,
            contents,
            Inputs(store, contents, PlacedInputs(config.inputs_from)),
            ask,
            lambda: self.forecast.are_late,
            served_models,
            config,
            ConcurrencyLimit(config.num_lines, config.max_bytes, lambda: self.forecast.goes_by_window),
            LoopTurns(),
            LineReader(),
            asyncio.Event(),
            hooks or JobHooks(),
        )
        self._runs: dict[Lease, JobRun] = {}
        self._leased = LeasedWork(store.release, self._over, "job")
        self._poller = StorePoller(self._look_and_tell, config.look_s, "jobs")
        # These run beside the looks: with a slow store or bucket they are slow, and leases must be renewed meanwhile.
        self._tidying = _BackgroundTask(self._tidy, "tidying up")
        self._forecasting = _BackgroundTask(self._estimate, "estimating when jobs will be done")
        self._patience_s = 0.0
        self._is_upgraded = False
        self._was_down = False
        # Number of open jobs by status, at the last look.
        self.num_open_jobs: Counter[str] = Counter()

    def wake(self) -> None:
        """Makes the next look happen now, because there is a new job or one that must be ended."""
        self._poller.wake()

    def cancel(self, job_id: JobId) -> None:
        """Stops this gateway's lines of a job that is being cancelled. Other gateways notice at their next look."""
        for lease, run in self._runs.items():
            if lease.id == job_id:
                run.cancel()
        self.wake()

    def stop(self, patience_s: float) -> None:
        """Begins no more lines, and lets running ones continue for `patience_s` seconds. Unfinished lines run after the
        next start."""
        self._patience_s = patience_s
        self._shared.stopping.set()
        self._poller.stop()

    async def run(self) -> None:
        """Runs until it is stopped."""
        try:
            await self._poller.run()
            await self._until_done()
        finally:
            await self._leased.cancel()
            await self._forecasting.cancel()
            await self._tidying.cancel()
            await self._shared.reader.aclose()

    async def _until_done(self) -> None:
        """Waits for the running lines, and renews their jobs' leases meanwhile."""
        give_up_s = time.monotonic() + self._patience_s
        while self._runs and (left_s := give_up_s - time.monotonic()) > 0:
            await asyncio.wait(self._leased.tasks.values(), timeout=min(left_s, self._config.look_s))
            with contextlib.suppress(StoreAway):
                await self._renew()

    async def _look_and_tell(self) -> None:
        try:
            await self._look()
        finally:
            self._tell_of_store()

    async def _look(self) -> None:
        if self._store.is_down:
            await self._store.probe()
        if not self._is_upgraded:
            await self._store.upgrade()
            self._is_upgraded = True
        await self._renew()
        self.num_open_jobs = await self._store.count_open()
        if self.num_open_jobs:
            for stage in STAGES:
                await self._take(stage)
        self._forecasting.begin()
        self._tidying.begin()

    async def _take(self, stage: Stage) -> None:
        num_held = sum(run.stage == stage for run in self._runs.values())
        if free := max(0, self._places[stage] - num_held):
            config = self._config
            for lease in await self._store.take(stage, self._name, config.lease_s, time.time(), free):
                self._runs[lease] = JobRun(self._shared, lease, stage)
                self._leased.begin(lease, self._work)

    async def _work(self, lease: Lease) -> None:
        await self._runs[lease].run()
        await self._leased.release(lease)

    def _over(self, lease: Lease) -> None:
        del self._runs[lease]
        # The job may be in its next stage, and a place is free.
        self.wake()

    def _running(self) -> list[JobId]:
        return [JobId(lease.id) for lease, run in self._runs.items() if run.stage == "run"]

    async def _renew(self) -> None:
        for lease in await self._leased.renew(self._store.renew, self._config.lease_s):
            self._runs[lease].cancel()

    async def _estimate(self) -> None:
        await self.forecast.look(self._running())

    async def _tidy(self) -> None:
        await self._contents.tidy(time.time())

    def _tell_of_store(self) -> None:
        if self._store.is_down != self._was_down:
            self._was_down = self._store.is_down
            if self._was_down:
                log.warning("the store is down: batch jobs wait for it (%s)", self._store.why_down)
            else:
                log.warning("the store is up again")


class _BackgroundTask:
    """Runs something beside the looks, at most once at a time. A failure is retried at a later look."""

    def __init__(self, work: Callable[[], Coroutine[None, None, None]], what: str) -> None:
        self._work = work
        self._what = what
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Starts it unless it is still running."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def cancel(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            with contextlib.suppress(StoreAway):
                await self._work()
        except Exception:
            log.exception("%s failed, and is tried again", self._what)
