"""How long policies take to plan an iteration: this machine's CPU time, in simulations that serve nothing else.

Elapsed time would be longer if other processes need the CPU at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling.boundary import DecodeBoundary
from alignedserve.scheduling.policies.accelgen import Accelgen
from alignedserve.scheduling.policies.apt import Apt
from alignedserve.scheduling.policies.bros import Bros
from alignedserve.scheduling.policies.default import Aligned
from alignedserve.scheduling.policy import DecodePart, Policy
from alignedserve.sim.scenario import Scenario
from alignedserve.sim.trace import Arrival
from alignedserve.timing.estimate import Estimate
from research.papers.figures import quantile


@dataclass(frozen=True, slots=True)
class Plan:
    num_waiting: int
    num_running: int
    seconds: float


# The plans that policies in this process have made since `plans_of` began.
_plans: list[Plan] = []


def _timing(part: DecodePart) -> DecodePart:
    plan = part.plan

    def timed(at: DecodeBoundary) -> None:
        num_waiting, num_running = len(at.requests) + len(at.batch), len(at.running)
        begun_s = time.thread_time()
        plan(at)
        _plans.append(Plan(num_waiting, num_running, time.thread_time() - begun_s))

    part.plan = timed  # type: ignore[method-assign]
    return part


class _Timed(Policy):
    def decode(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return _timing(super().decode(limits, estimate))

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return _timing(super().colocated(limits, estimate))


class TimedAligned(_Timed, Aligned):
    pass


class TimedApt(_Timed, Apt):
    pass


class TimedBros(_Timed, Bros):
    pass


class TimedAccelgen(_Timed, Accelgen):
    pass


def policy_name(policy: type[Policy]) -> str:
    """Returns the name that `--policy` takes."""
    return f"{policy.__module__}:{policy.__qualname__}"


def plans_of(scenario: Scenario, arrivals: Sequence[Arrival], until_s: float | None = None) -> list[Plan]:
    """Returns the plans of iterations in which something runs."""
    _plans.clear()
    scenario.simulate(arrivals, until_s)
    return [plan for plan in _plans if plan.num_running]


def median_ms(plans: Sequence[Plan]) -> float:
    return 1e3 * quantile([plan.seconds for plan in plans], 0.5)
