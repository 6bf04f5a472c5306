"""Stall-free batching, as Sarathi-Serve does it on colocated instances: every iteration has all decodes, and prompts
get what is left of a budget of tokens, in chunks.

The budget is what an iteration can compute within the tightest TBT objective of the running requests: the paper finds
it by profiling, here the cost model predicts it. Admission is that of vLLM, on which Sarathi-Serve is built. Where
prefill and decode are apart there is nothing to stall, and this policy is `fcfs`.
"""

from __future__ import annotations

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import DecodeBoundary
from alignedserve.scheduling.chunk_budget import tokens_beside
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.base import ColocatedPart, DecodePart, Policy
from alignedserve.timing.estimate import Estimate


class SarathiColocated(ColocatedPart):
    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate | None) -> None:
        super().__init__(limits, config)
        self._estimate = estimate

    def plan(self, at: DecodeBoundary) -> None:
        self.preempt(at, decoding.victims(at, self.config.evict_ahead, self.in_eviction_order))
        ready, behind = at.ready_and_behind()
        lengths = [request.num_tokens for request in at.run_each(ready)]
        candidates = [*at.requests, *at.batch]
        if not (behind or candidates):
            return
        num_left = tokens_beside(at, self._estimate, lengths)
        for request in behind:
            num_left -= decoding.compute(at, request, num_left)
        decoding.begin_in_order(at, self.config, candidates, num_left)


class Sarathi(Policy):
    name = "sarathi"
    summary = (
        "in order of arrival; where prompts are computed beside decodes, within what these have time for"
    )

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return SarathiColocated(limits, self.config, estimate)
