"""The current conditions for messages and copies. Each of them has a random number of its own (chances.py)."""

from __future__ import annotations

from alignedserve.sim.clock import Clock
from alignedserve.sim.faults import NoFaults
from alignedserve.types import InstanceId, RequestKey
from alignedserve.vopr.chances import KeyedRandom
from alignedserve.vopr.history import FailingCopies, Late, SlowCopies
from alignedserve.vopr.plan import Plan


class Conditions(NoFaults):
    def __init__(self, plan: Plan, clock: Clock) -> None:
        self._plan = plan
        self._clock = clock
        self._chances = KeyedRandom(plan.seed)
        # The current faults, each with the second at which it ends.
        self._late: list[tuple[float, Late]] = []
        self._failing: list[tuple[float, FailingCopies]] = []
        self._slow: list[tuple[float, SlowCopies]] = []

    def add(self, action: Late | FailingCopies | SlowCopies) -> None:
        end_s = self._clock.now + action.seconds
        match action:
            case Late():
                self._late.append((end_s, action))
            case FailingCopies():
                self._failing.append((end_s, action))
            case SlowCopies():
                self._slow.append((end_s, action))

    def calm(self) -> None:
        self._late, self._failing, self._slow = [], [], []

    def latency(self, process: InstanceId, is_up: bool) -> float | None:
        most_s, now = self._plan.max_latency_s, self._clock.now
        for end_s, late in self._late:
            if now < end_s and (late.process, late.is_up) == (process, is_up):
                most_s = max(most_s, late.latency_s)
        return most_s * (0.1 + 0.9 * self._chances.next(f"{process} {is_up}"))

    def copy_share(self, what: str, key: RequestKey) -> float | None:
        now = self._clock.now
        failing = [each for end_s, each in self._failing if now < end_s and each.what in ("", what)]
        rate = max((each.rate for each in failing), default=0.0)
        if not rate or self._chances.next(f"{what} {key}") >= rate:
            return None
        # A third of them fail at their start.
        return max(0.0, 1.5 * self._chances.next(f"share {what} {key}") - 0.5)

    def copy_slowdown(self, what: str) -> float:
        now = self._clock.now
        slow = [each for end_s, each in self._slow if now < end_s and each.what in ("", what)]
        return max((each.slowdown for each in slow), default=1.0)
