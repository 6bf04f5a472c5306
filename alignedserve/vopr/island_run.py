"""Runs the history of an island: faults and requests, then calm, then the end, at which everything has ended and is
empty."""

from __future__ import annotations

from collections import Counter

from alignedserve.vopr.build import make_island
from alignedserve.vopr.checks import CountsAddUp, PhasesSeen, RealTimeFirst
from alignedserve.vopr.clients import CLIENTS, Clients
from alignedserve.vopr.event_logs import OpenLog
from alignedserve.vopr.failures import Broken, failure_of
from alignedserve.vopr.history import ROUTER, Arrive, History
from alignedserve.vopr.island_driver import IslandDriver
from alignedserve.vopr.launcher import Launcher
from alignedserve.vopr.liveness import STANDSTILL_S, patience_s
from alignedserve.vopr.outcome import RunOutcome

# Seconds between two checks of the requests' progress.
LOOK_S = 10.0


class IslandRun:
    def __init__(self, history: History, open_log: OpenLog | None = None) -> None:
        """`open_log`: opens the file of a router's event log."""
        plan = self._plan = history.plan
        self._actions = history.actions
        self.island, conditions = make_island(plan)
        self._clock = self.island.world.clock
        self._clients: Clients = CLIENTS[plan.clients](self.island)
        router = self.island.router
        processes = {ROUTER: router} | {name: self.island.world.processes[name] for name in plan.processes}
        launcher = self._launcher = Launcher(self._clock, plan, processes, [self.island.pool])
        self.island.world.fenced = lambda process: launcher.fenced(process.instance_id)
        router.open_log = open_log
        if RealTimeFirst.is_promised(plan):
            router.observers.append(RealTimeFirst(self.island))
        self._phases = PhasesSeen()
        router.observers.append(self._phases)
        self._driver = IslandDriver(self.island, self._clients, self._launcher, conditions)

    def __call__(self) -> RunOutcome:
        failure = None
        try:
            self._run()
        except Exception as error:
            failure = failure_of(error, self._clock.now)
        happened = self._driver.happened
        happened["fenced"] = self._launcher.num_fenced
        streams = self._clients.streams
        return RunOutcome(
            failure,
            self._clock.now,
            len(streams),
            sum(len(stream.tokens) for stream in streams),
            self._clock.num_events,
            happened,
            self._phases.counts,
            Counter(str(stream.outcome) for stream in streams),
            self._driver.visits.counts,
        )

    def _run(self) -> None:
        island, plan = self.island, self._plan
        self._driver.schedule(self._actions)
        island.start()
        island.router.observers.append(CountsAddUp(island))
        self._clock.run_until(plan.duration_s)
        self._driver.calm()
        self._until_all_ended()
        self._settle()
        self._clients.check_end()
        island.check()
        island.check_idle()

    def _until_all_ended(self) -> None:
        begun_s, progress, progress_s = self._clock.now, self._progress(), self._clock.now
        limit_s = begun_s + self._patience_s()
        while num_open := self._clients.num_open:
            if self._clock.now >= limit_s:
                raise Broken(f"{num_open} requests are open {limit_s - begun_s:.0f} s after the last fault")
            if self._clock.now - progress_s >= STANDSTILL_S:
                raise Broken(
                    f"{num_open} requests are open, and none has progressed for {STANDSTILL_S:.0f} s"
                )
            self._clock.run_until(min(limit_s, self._clock.now + LOOK_S))
            if self._progress() != progress:
                progress, progress_s = self._progress(), self._clock.now

    def _progress(self) -> tuple[int, int]:
        """Changes when a request gets a token, or ends."""
        return self._clients.num_open, sum(len(stream.tokens) for stream in self._clients.streams)

    def _patience_s(self) -> float:
        arrivals = [each for each in self._actions if isinstance(each, Arrive)]
        return patience_s(self._plan, [(each.prompt_len, each.output_len) for each in arrivals])

    def _settle(self) -> None:
        """Waits for messages, copies and orphans. Clocks may run at half speed. A slow link may still save answers that
        their clients have long had."""
        limit_s = self._clock.now + self._patience_s()
        while any(len(each.worker.copies) for each in self.island.instances) and self._clock.now < limit_s:
            self._clock.run_until(self._clock.now + LOOK_S)
        self._clock.run_until(self._clock.now + 3 * self._plan.orphan_s + 10.0)
