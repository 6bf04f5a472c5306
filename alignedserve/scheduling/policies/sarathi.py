"""Stall-free batching, as Sarathi-Serve does it on colocated instances: every iteration has all decodes, and prompts
get the rest of a token budget, in chunks.

The budget is what an iteration can compute within the tightest TBT objective of the running requests. The paper finds
it by profiling; here the cost model predicts it. Admission is vLLM's, on which Sarathi-Serve is built. With separate
prefill and decode nothing can stall, and this policy equals `fcfs`.
"""

from __future__ import annotations

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import DecodeBoundary
from alignedserve.scheduling.chunk_budget import tokens_beside
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policy import ColocatedPart, DecodePart, Policy
from alignedserve.timing.estimate import Estimate


class SarathiColocated(ColocatedPart):
    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate | None) -> None:
        super().__init__(limits, config)
        self._estimate = estimate

    def plan(self, at: DecodeBoundary) -> None:
        self.preempt(at, decoding.victims(at, self.config.evict_ahead, self.in_eviction_order))
        ready, behind = at.ready_and_pending()
        lengths = [request.num_read for request in at.run_many(ready)]
        candidates = [*at.requests, *at.batch]
        if not (behind or candidates):
            return
        num_left = tokens_beside(at, self._estimate, lengths)
        for request in behind:
            num_left -= decoding.compute(at, request, num_left)
        decoding.begin_in_order(at, self.config, candidates, num_left)


class Sarathi(Policy):
    name = "sarathi"
    summary = "in order of arrival; beside decodes, prompts get only as many tokens as these have time for"

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return SarathiColocated(limits, self.config, estimate)
