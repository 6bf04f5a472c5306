"""The current conditions for messages and copies. Each of them has a random number of its own (chances.py)."""

from __future__ import annotations

from typing import TypeVar

from alignedserve.sim.clock import Clock
from alignedserve.sim.faults import NoFaults
from alignedserve.types import InstanceId, RequestKey
from alignedserve.vopr.chances import KeyedRandom
from alignedserve.vopr.history import FailingCopies, Late, LoseStore, SlowCopies, StoreForgetful, StoreSlow
from alignedserve.vopr.plan import Plan

Passing = Late | FailingCopies | SlowCopies | LoseStore | StoreSlow | StoreForgetful
Kind = TypeVar("Kind", bound=Passing)


class PassingFaults:
    def __init__(self, plan: Plan, clock: Clock) -> None:
        self._plan = plan
        self._clock = clock
        self._chances = KeyedRandom(plan.seed)
        # The current faults, each with the second at which it ends.
        self._passing: list[tuple[float, Passing]] = []

    def add(self, action: Passing) -> None:
        self._passing.append((self._clock.now + action.seconds, action))

    def calm(self) -> None:
        self._passing.clear()

    def _now(self, kind: type[Kind]) -> list[Kind]:
        now = self._clock.now
        return [each for end_s, each in self._passing if now < end_s and isinstance(each, kind)]

    def _drawn_s(self, most_s: float, purpose: str) -> float:
        """Returns a random time of at most this."""
        return most_s * (0.1 + 0.9 * self._chances.next(purpose))


class Conditions(PassingFaults, NoFaults):
    def latency(self, process: InstanceId, is_up: bool) -> float | None:
        way = process, is_up
        lates = [late.latency_s for late in self._now(Late) if (late.process, late.is_up) == way]
        return self._drawn_s(max([self._plan.max_latency_s, *lates]), f"{process} {is_up}")

    def copy_share(self, what: str, key: RequestKey) -> float | None:
        rate = max((each.rate for each in self._now(FailingCopies) if each.what in ("", what)), default=0.0)
        if not rate or self._chances.next(f"{what} {key}") >= rate:
            return None
        # A third of them fail at their start.
        return max(0.0, 1.5 * self._chances.next(f"share {what} {key}") - 0.5)

    def copy_slowdown(self, what: str) -> float:
        slowdowns = (each.slowdown for each in self._now(SlowCopies) if each.what in ("", what))
        return max(slowdowns, default=1.0)
