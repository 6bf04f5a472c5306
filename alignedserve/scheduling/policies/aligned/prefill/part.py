"""What a prefill instance does at an iteration boundary: which prompts start (`admission.py`), the most urgent first
(`urgency.py`), and how much of each is computed (`chunks.py`). Real time (RT) and best effort (BE) share it like this
(`mixing.py`):

- **Time.** An iteration of BE is bounded by a share of the tightest TTFT objective that was seen lately, and one of RT
  by that objective, or by what RT needs for nearly its full pace. RT goes first; BE
  fills up an iteration in which RT runs only while that takes hardly any longer.
- **Room.** BE leaves some blocks free for RT, and is preempted when RT finds too few all the same.
- **Credit.** While BE is there, a credit grows, which is spent on BE before RT.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import prefilling
from alignedserve.scheduling.boundary import AnyPrefill, PrefillBoundary, PrefillRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.prefill.admission import admit
from alignedserve.scheduling.policies.aligned.prefill.mixing import Mixing
from alignedserve.scheduling.policies.aligned.prefill.urgency import is_ahead, place_of
from alignedserve.scheduling.policies.base import PrefillPart
from alignedserve.timing.estimate import Estimate


class AlignedPrefill(PrefillPart):
    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate) -> None:
        super().__init__(limits, config)
        self._estimate = estimate
        self._mixing = Mixing(limits, config, estimate)

    def in_order(self, requests: Sequence[AnyPrefill], now: float) -> Sequence[AnyPrefill]:
        def order(request: PrefillRequest) -> tuple[bool, float]:
            return not request.is_rt, place_of(request, self._estimate, now)

        return sorted(requests, key=order)

    def in_staging_order(self, candidates: Sequence[AnyPrefill]) -> Sequence[AnyPrefill]:
        return prefilling.real_time_first(candidates)

    def is_ahead(self, begun: PrefillRequest, request: PrefillRequest, now: float) -> bool:
        return is_ahead(begun, request, self._estimate, now)

    def plan(self, at: PrefillBoundary) -> None:
        self._mixing.look(at)
        admit(at, self._mixing, self.in_order)
        requests = self.in_order(at.computing, at.now)
        for request, count in self._mixing.cut(requests, at.num_tokens_left, may_fill=not at.is_rt_copied):
            at.chunk(request, count)
