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
    LeaseLost,
    Stage,
    Store,
    StoreAway,
)
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
        self._held: dict[Lease, tuple[JobRun, asyncio.Task[None]]] = {}
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
        for lease, (run, _) in self._held.items():
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
            for _, task in self._held.values():
                task.cancel()
            await self._forecasting.cancel()
            await self._tidying.cancel()
            await asyncio.gather(*self._tasks(), return_exceptions=True)
            await self._shared.reader.aclose()

    async def _until_done(self) -> None:
        """Waits for the running lines, and renews their jobs' leases meanwhile."""
        give_up_s = time.monotonic() + self._patience_s
        while self._held and (left_s := give_up_s - time.monotonic()) > 0:
            await asyncio.wait(self._tasks(), timeout=min(left_s, self._config.look_s))
            with contextlib.suppress(StoreAway):
                await self._renew()

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [task for _, task in self._held.values()]

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
        num_held = sum(run.stage == stage for run, _ in self._held.values())
        if free := max(0, self._places[stage] - num_held):
            config = self._config
            for lease in await self._store.take(stage, self._name, config.lease_s, time.time(), free):
                self._begin(lease, stage)

    def _begin(self, lease: Lease, stage: Stage) -> None:
        run = JobRun(self._shared, lease, stage)
        task = asyncio.create_task(self._work(lease, run))
        self._held[lease] = run, task
        task.add_done_callback(lambda _: self._over(lease))

    def _over(self, lease: Lease) -> None:
        del self._held[lease]
        # The job may be in its next stage, and a place is free.
        self.wake()

    async def _work(self, lease: Lease, run: JobRun) -> None:
        try:
            await run.run()
            await self._let_go(lease)
        except asyncio.CancelledError:
            await self._let_go(lease)
            raise
        except Exception as error:
            # The lease is not released: it expires, which delays the next try.
            if not _is_lost(error):
                log.exception("job %s failed, and is tried again", lease.id)

    def _running(self) -> list[JobId]:
        return [JobId(lease.id) for lease, (run, _) in self._held.items() if run.stage == "run"]

    async def _let_go(self, lease: Lease) -> None:
        with contextlib.suppress(StoreAway):
            await self._store.release(lease)

    async def _renew(self) -> None:
        """Renews the leases. While the store is down, no other gateway can take them."""
        leases = list(self._held)
        states = await self._store.renew(leases, self._config.lease_s)
        for lease, state in zip(leases, states, strict=True):
            if lease not in self._held:
                continue
            run, task = self._held[lease]
            if state == "lost":
                task.cancel()
            elif state == "cancelling":
                run.cancel()

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


def _is_lost(error: BaseException) -> bool:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return isinstance(error, LeaseLost)
