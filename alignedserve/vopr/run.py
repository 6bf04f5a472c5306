"""Runs a history: faults and requests, then calm, then the end, at which everything has ended and is empty."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import BinaryIO, cast

from alignedserve.protocol.messages import Tokens
from alignedserve.router.eventlog import EventLog
from alignedserve.router.events import Event, Send
from alignedserve.types import Epoch
from alignedserve.vopr.arrivals import make_arrivals
from alignedserve.vopr.build import make_island
from alignedserve.vopr.checks import CountsAddUp, RealTimeFirst
from alignedserve.vopr.clients import CLIENTS, Clients
from alignedserve.vopr.driver import Driver
from alignedserve.vopr.failures import Broken, Failure, failure_of
from alignedserve.vopr.faults import make_faults
from alignedserve.vopr.history import Action, AnyAction, Arrive, History
from alignedserve.vopr.launcher import Launcher
from alignedserve.vopr.plan import make_plan

# Once there is calm, some request gets a token or ends every so many seconds.
STANDSTILL_S = 600.0
# Every open request ends within so many seconds, and so many times as long as all would take one after the other.
LIVENESS_S = 600.0
LIVENESS_TIMES = 3.0
# A run that takes more events than this in so many virtual seconds goes in circles.
MAX_EVENTS, WINDOW_S = 20_000, 10.0
# The policies of which an observer knows what they promise real time.
_REAL_TIME_FIRST = ("priority",)

OpenLog = Callable[[Epoch], BinaryIO]


@dataclass
class Outcome:
    failure: Failure | None
    # Virtual seconds.
    duration_s: float
    num_requests: int
    num_tokens: int
    num_events: int
    # How many actions of each kind happened, the fence's kills included.
    happened: Counter[str] = field(default_factory=Counter)
    # How often requests were in each phase.
    phases: Counter[str] = field(default_factory=Counter)
    # How requests ended.
    ends: Counter[str] = field(default_factory=Counter)


def history_of(seed: int, policies: tuple[str, ...] = ()) -> History:
    plan = make_plan(seed, policies)
    actions: list[Action] = [*make_arrivals(Random(f"arrivals of {seed}"), plan)]
    actions += make_faults(Random(f"faults of {seed}"), plan)
    return History(plan, cast(list[AnyAction], sorted(actions, key=lambda action: action.at_s)))


class Run:
    def __init__(self, history: History, open_log: OpenLog | None = None) -> None:
        """`open_log`: makes the file of a router's event log."""
        plan = self._plan = history.plan
        self._actions = history.actions
        self.island, conditions = make_island(plan)
        self._clock = self.island.world.clock
        self._clients: Clients = CLIENTS[plan.clients](self.island)
        self._launcher = Launcher(self.island, plan)
        router = self.island.router
        if open_log:
            config = self.island.config
            router.make_log = lambda epoch: EventLog(open_log(epoch), config.router, epoch, config.scheduling)
        if plan.policy in _REAL_TIME_FIRST and not plan.num_colocated:
            router.observers.append(RealTimeFirst(self.island))
        self._phases: Counter[str] = Counter()
        router.observers.append(self._count_phases)
        self._driver = Driver(self.island, self._clients, self._launcher, conditions)

    def __call__(self) -> Outcome:
        failure = None
        try:
            self._run()
        except Exception as error:
            failure = failure_of(error, self._clock.now)
        happened = self._driver.happened
        happened["fenced"] = self._launcher.num_fenced
        streams = self._clients.streams
        return Outcome(
            failure,
            self._clock.now,
            len(streams),
            sum(len(stream.tokens) for stream in streams),
            self._clock.num_events,
            happened,
            self._phases,
            Counter(str(stream.outcome) for stream in streams),
        )

    def _run(self) -> None:
        island, plan = self.island, self._plan
        self._driver.schedule(self._actions)
        island.start()
        island.router.observers.append(CountsAddUp(island))
        self._until(plan.duration_s)
        self._driver.calm()
        self._until_all_ended()
        self._settle()
        self._clients.check_end()
        island.check()
        island.check_idle()

    def _until_all_ended(self) -> None:
        limit_s, progress, progress_s = (
            self._clock.now + self._patience_s(),
            self._progress(),
            self._clock.now,
        )
        while self._clients.num_open:
            if self._clock.now >= limit_s:
                raise Broken(
                    f"{self._clients.num_open} requests are open {self._patience_s():.0f} s after the last fault"
                )
            if self._clock.now - progress_s >= STANDSTILL_S:
                raise Broken(
                    f"{self._clients.num_open} requests are open, and none has got on for {STANDSTILL_S:.0f} s"
                )
            self._until(min(limit_s, self._clock.now + WINDOW_S))
            if self._progress() != progress:
                progress, progress_s = self._progress(), self._clock.now

    def _progress(self) -> tuple[int, int]:
        """Changes when a request gets a token, or ends."""
        return self._clients.num_open, sum(len(stream.tokens) for stream in self._clients.streams)

    def _until(self, time_s: float) -> None:
        while self._clock.now < time_s:
            end_s, num_allowed = min(time_s, self._clock.now + WINDOW_S), self._clock.num_events + MAX_EVENTS
            while self._clock.step(end_s):
                if self._clock.num_events > num_allowed:
                    raise Broken(f"more than {MAX_EVENTS} events in {WINDOW_S:.0f} s: it goes in circles")
            self._clock.run_until(end_s)

    def _patience_s(self) -> float:
        """By then every request has ended, though each might be alone, and have begun anew."""
        arrivals = [action for action in self._actions if isinstance(action, Arrive)]
        cost = self.island.world.cost
        alone_s = sum(
            cost.fastest_ttft_s(each.prompt_len, self._plan.max_num_batched_tokens)
            + each.output_len * cost.fastest_tbt_s(each.prompt_len)
            for each in arrivals
        )
        return LIVENESS_S + LIVENESS_TIMES * alone_s

    def _settle(self) -> None:
        """Messages, copies and orphans, by clocks that may run at half the speed."""
        self._until(self._clock.now + 3 * self._plan.orphan_s + 10.0)

    def _count_phases(self, now: float, event: Event, sends: list[Send]) -> None:
        for send in sends:
            if isinstance(send.message, Tokens):
                for timeline in send.message.timelines.values():
                    self._phases.update({phase for phase, _ in timeline})


def run(history: History, open_log: OpenLog | None = None) -> Outcome:
    return Run(history, open_log)()


class _Hashing:
    """A file that only its hash is kept of."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._sha.update(data)
        return len(data)

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


def log_hash(history: History) -> str:
    """Returns the hash of everything that all routers of a run hear and say."""
    hashing = _Hashing()
    run(history, lambda epoch: cast(BinaryIO, hashing))
    return hashing.hexdigest()


def open_in(directory: Path, name: str) -> OpenLog:
    """Returns what opens a file for each router's log in the directory."""

    def open_log(epoch: Epoch) -> BinaryIO:
        return (directory / f"{name}-router-{epoch}.events").open("wb", buffering=0)

    return open_log
