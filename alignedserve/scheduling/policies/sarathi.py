"""Stall-free batching, as Sarathi-Serve does it on colocated instances: every iteration has all decodes, and prompts
get what is left of a budget of tokens, in chunks.

The budget is what an iteration can compute within the tightest TBT objective of the running requests: the paper finds
it by profiling, here the cost model predicts it. Where prefill and decode are apart there is nothing to stall, and
this policy is `fcfs`.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import DecodeBoundary
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.base import ColocatedPart, DecodePart, Policy
from alignedserve.timing.estimate import Estimate


class SarathiColocated(ColocatedPart):
    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate | None) -> None:
        super().__init__(limits, config)
        self._estimate = estimate

    def plan(self, at: DecodeBoundary) -> None:
        at.evict(decoding.victims(at, self.config.evict_ahead, self.in_eviction_order))
        ready, behind = at.ready_and_behind()
        lengths = [request.num_tokens for request in at.run_each(ready)]
        num_left = self._budget(at, lengths)
        for request in behind:
            num_left -= decoding.compute(at, request, num_left)
        decoding.begin_in_order(at, self.config, [*at.requests, *at.batch], num_left)

    def _budget(self, at: DecodeBoundary, lengths: list[int]) -> int:
        """The number of prompt tokens, in whole blocks, and at least one block, so that prompts make progress."""
        tightest_s = min((request.deadlines.tbt_s for request in at.running), default=math.inf)
        if self._estimate is None or math.isinf(tightest_s):
            return at.num_tokens_left
        estimate, block_size = self._estimate, at.limits.block_size

        def seconds(num_blocks: int) -> float:
            return estimate.iteration([(0, num_blocks * block_size)], lengths)

        num_blocks = bisect_right(range(1, at.num_tokens_left // block_size + 1), tightest_s, key=seconds)
        return min(max(num_blocks, 1) * block_size, at.num_tokens_left)


class Sarathi(Policy):
    name = "sarathi"
    summary = (
        "in order of arrival; where prompts are computed beside decodes, within what these have time for"
    )

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return SarathiColocated(limits, self.config, estimate)
