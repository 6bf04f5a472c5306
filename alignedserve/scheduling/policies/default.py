"""AlignedServe's own policy, the default: decode batches of requests of similar prefix length, and deadlines.

What differs from the paper:

- Where the next batch of best effort begins before the old one has ended, the rest of the old one returns to the pool
  instead of decoding on (`aligned/router/batches.py`). By `research.papers`, throughput is the same, and less mixes.
- Real time beside best effort has no batches of its own, since none waits for others of its length. Alone it has them,
  until some is lost. Deadlines decide when it is admitted.
- Batches of best effort are formed only where they save more time than they cost. That depends on the attention kernel
  and on common prefixes (`Likeness`).

An instance without a cost model can't predict how long an iteration takes. It then schedules by class alone, as
`priority` does.
"""

from __future__ import annotations

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling.policies.aligned.decode.part import AlignedDecode
from alignedserve.scheduling.policies.aligned.prefill.part import AlignedPrefill
from alignedserve.scheduling.policies.aligned.router.part import AlignedRouter
from alignedserve.scheduling.policies.priority import PriorityColocated, PriorityDecode, PriorityPrefill
from alignedserve.scheduling.policy import DecodePart, Policy, PrefillPart, RouterPart
from alignedserve.timing.estimate import Estimate


class Aligned(Policy):
    name = "aligned"
    summary = "batches of similar length, deadlines"

    def router(self) -> RouterPart:
        return AlignedRouter(self.config)

    def prefill(self, limits: InstanceLimits, estimate: Estimate | None) -> PrefillPart:
        if estimate is None:
            return PriorityPrefill(limits, self.config)
        return AlignedPrefill(limits, self.config, estimate)

    def decode(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        if estimate is None:
            return PriorityDecode(limits, self.config)
        return AlignedDecode(limits, self.config, estimate)

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        if estimate is None:
            return PriorityColocated(limits, self.config)
        return AlignedDecode(limits, self.config, estimate)
