"""Baselines of the papers that only this benchmark needs, as policies for `--policy module:Class`.

The papers' vLLM, and what they built on it, drop the KV of a preempted request and compute it again. `AGAIN` says so
for any policy.
"""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policy import ColocatedPart, DecodePart, Policy
from alignedserve.timing.estimate import Estimate


class PromptsFirstPart(ColocatedPart):
    """vLLM before chunked prefill: an iteration computes prompts as long as one fits, and otherwise decodes."""

    def plan(self, at: DecodeBoundary) -> None:
        self.preempt(at, decoding.victims(at, self.config.evict_ahead, self.in_eviction_order))
        ready, behind = at.ready_and_pending()
        num_left = at.num_tokens_left
        for request in behind:
            decoding.compute(at, request, at.num_tokens_left)
        decoding.begin_in_order(at, self.config, [*at.requests, *at.batch])
        if at.num_tokens_left == num_left:
            at.run_many(ready)


class PromptsFirst(Policy):
    name = "prompts-first"
    summary = "in order of arrival, prompts in iterations of their own"

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return PromptsFirstPart(limits, self.config)


class RoundRobinPart(ColocatedPart):
    """BROS's baseline: iterations alternate between real time and best effort, and each goes in order of arrival."""

    def __init__(self, limits: InstanceLimits, config: SchedulingConfig) -> None:
        super().__init__(limits, config)
        self._is_rt_next = True

    def plan(self, at: DecodeBoundary) -> None:
        self.preempt(at, decoding.victims(at, self.config.evict_ahead, self.in_eviction_order))
        for is_rt in (self._is_rt_next, not self._is_rt_next):
            num_left = at.num_tokens_left
            self._run(at, lambda request, is_rt=is_rt: request.is_rt == is_rt)  # type: ignore[misc]
            if at.num_tokens_left < num_left:
                self._is_rt_next = not is_rt
                return

    def _run(self, at: DecodeBoundary, is_of_class: Callable[[DecodeRequest], bool]) -> None:
        ready, behind = at.ready_and_pending()
        at.run_many([each for each in ready if is_of_class(each)])
        for request in filter(is_of_class, behind):
            decoding.compute(at, request, at.num_tokens_left)
        waiting = [each for each in (*at.requests, *at.batch) if is_of_class(each)]
        decoding.begin_in_order(at, self.config, waiting)


class RoundRobin(Policy):
    name = "round-robin"
    summary = "real time and best effort in turn"

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return RoundRobinPart(limits, self.config)


# The preemption mode of vLLM.
AGAIN = "recompute"
PROMPTS_FIRST = f"{__name__}:PromptsFirst"
ROUND_ROBIN = f"{__name__}:RoundRobin"
