"""`fcfs`, but who leaves does so without its KV: see `DecodeBoundary.drop`."""

from __future__ import annotations

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import DecodeBoundary
from alignedserve.scheduling.policy import ColocatedPart, DecodePart, Policy
from alignedserve.timing.estimate import Estimate

NAME = f"{__name__}:Dropping"


class DroppingDecode(DecodePart):
    def plan(self, at: DecodeBoundary) -> None:
        at.drop(decoding.victims(at, 1, self.in_eviction_order))
        decoding.run_all(at)
        decoding.admit_in_order(at, self.config)


class DroppingColocated(ColocatedPart):
    def plan(self, at: DecodeBoundary) -> None:
        at.drop(decoding.victims(at, 1, self.in_eviction_order))
        decoding.go_on(at, at.running)
        decoding.begin_in_order(at, self.config, [*at.requests, *at.batch])


class Dropping(Policy):
    name = "dropping"
    summary = "who leaves is computed again"

    def decode(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return DroppingDecode(limits, self.config)

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return DroppingColocated(limits, self.config)
