"""Runs the history of a whole system: faults and clients, then calm, then the end, at which every client has its answer
and everything is empty."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from alignedserve.batch.config import BatchConfig
from alignedserve.vopr.build import island_config
from alignedserve.vopr.checks import PhasesSeen, RealTimeFirst
from alignedserve.vopr.conditions import Conditions
from alignedserve.vopr.event_logs import OpenLog
from alignedserve.vopr.failures import Broken, failure_of
from alignedserve.vopr.front_end.conditions import FrontConditions
from alignedserve.vopr.front_end.front import Front, FrontConfig
from alignedserve.vopr.front_end.whole_driver import WholeDriver
from alignedserve.vopr.history import Ask, History, SubmitJob
from alignedserve.vopr.launcher import Launcher
from alignedserve.vopr.liveness import BoundedClock, patience_s
from alignedserve.vopr.outcome import RunOutcome

# Seconds between two checks of the invariants.
LOOK_S = 1.0


class WholeRun:
    def __init__(self, history: History, open_log: OpenLog | None = None, keeps_lines: bool = False) -> None:
        """`open_log`: opens the file of a router's event log. `keeps_lines`: keeps the journal as text."""
        plan = self._plan = history.plan
        if plan.front is None:
            raise ValueError(f"seed {plan.seed}: is the plan of an island alone")
        self._asking = [each for each in history.actions if isinstance(each, Ask | SubmitJob)]
        config = FrontConfig(
            island_config(plan),
            plan.front.num_islands,
            plan.num_gateways,
            BatchConfig(max_num_lines=plan.front.batch_lines, max_num_jobs=plan.front.batch_jobs),
        )
        clock = BoundedClock()
        conditions, copies = FrontConditions(plan, plan.front, clock), Conditions(plan, clock)
        front = self.front = Front(config, plan.seed, clock, conditions, keeps_lines)
        conditions.rule(front.loop.network)
        for island in front.islands:
            island.world.faults = copies
        self._launcher = Launcher(
            clock,
            plan,
            front.processes,
            [island.pool for island in front.islands],
            {gateway.name: gateway for gateway in front.gateways},
        )
        front.on_fenced(self._launcher.fenced)
        self._driver = WholeDriver(front, self._launcher, conditions, copies, plan.silence_s)
        self._driver.schedule(history.actions)
        self._phases = PhasesSeen()
        self._observe(open_log)

    def _observe(self, open_log: OpenLog | None) -> None:
        for island, router in zip(self.front.islands, self.front.routers, strict=True):
            router.observers.append(self._phases)
            if RealTimeFirst.is_promised(self._plan):
                router.observers.append(RealTimeFirst(island))
            router.open_log = open_log

    def __call__(self) -> RunOutcome:
        front, failure = self.front, None
        try:
            front.run(self._drive)
        except Exception as error:
            failure = failure_of(error, front.clock.now)
        happened = self._driver.happened
        happened["fenced"] = self._launcher.num_fenced
        return RunOutcome(
            failure,
            front.clock.now,
            len(self._asking),
            front.clients.num_tokens,
            front.clock.num_events,
            happened,
            self._phases.counts,
            front.clients.ends,
            self._driver.visits.counts,
        )

    async def _drive(self, front: Front) -> None:
        last_s = max([self._plan.duration_s, *(each.at_s for each in self._asking)])
        await self._until(self._plan.duration_s)
        self._driver.calm()
        await self._until(last_s)
        limit_s = front.clock.now + patience_s(self._plan, self._lengths())
        while front.clients.num_open and front.clock.now < limit_s:
            await self._until(front.clock.now + LOOK_S)
        if front.clients.num_open:
            raise Broken(
                f"{front.clients.num_open} clients wait {limit_s - last_s:.0f} s after the last arrival"
            )
        # First jobs that a client has created twice, because it got no answer; then messages, copies and orphans.
        while front.ledger.open_jobs and front.clock.now < limit_s:
            await self._until(front.clock.now + LOOK_S)
        await self._until(front.clock.now + 3 * self._plan.orphan_s + 3 * self._plan.silence_s)
        front.check_idle()

    async def _until(self, time_s: float) -> None:
        while (left_s := time_s - self.front.clock.now) > 0:
            await asyncio.sleep(min(LOOK_S, left_s))
            self.front.check()

    def _lengths(self) -> Iterator[tuple[int, int]]:
        for each in self._asking:
            num_lines = each.num_lines if isinstance(each, SubmitJob) else 1
            yield from [(each.prompt_len, each.output_len)] * num_lines
