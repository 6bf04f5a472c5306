"""What a decode instance does at an iteration boundary, and a colocated one, where prompts are candidates too.

There are the running batch R, candidate requests Q (which may join R) and the candidate batch B (which runs next):

1. Victims are chosen when R will not fit, or real time finds no room (`eviction.py`, `victims.py`).
2. Real time (RT) is admitted before best effort (BE), Q before B, and B once R is below its fill mark (`admission.py`).
3. RT runs, and of BE as much as RT allows; RT that can wait lets RT that can't go first (`iterations.py`).

RT and BE share the instance like this (`mixing.py`):

- **Time.** While RT is about to come, iterations are short, and none begins while its KV is on its way.
- **Room.** BE leaves some blocks and a slot free for RT. When RT finds none all the same, BE is evicted.
- **Credit.** While BE is there, a credit grows, which is spent on BE beyond what RT allows.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import AnyDecode, DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.decode.admission import Admission
from alignedserve.scheduling.policies.aligned.decode.eviction import Eviction
from alignedserve.scheduling.policies.aligned.decode.iterations import fill
from alignedserve.scheduling.policies.aligned.decode.mixing import Mixing
from alignedserve.scheduling.policies.base import DecodePart
from alignedserve.scheduling.remaining_time import RemainingTime
from alignedserve.timing.estimate import Estimate


class AlignedDecode(DecodePart):
    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate) -> None:
        super().__init__(limits, config)
        self._time = RemainingTime(limits, estimate)
        self._mixing = Mixing(limits, config, estimate)
        self._eviction = Eviction(config, self._mixing)
        self._admission = Admission(config, self._mixing)

    def in_order(self, requests: Sequence[AnyDecode], now: float) -> Sequence[AnyDecode]:
        return decoding.real_time_first(requests)

    def is_ahead(self, begun: DecodeRequest, request: DecodeRequest, now: float) -> bool:
        """Real time does not wait for best effort."""
        return begun.is_rt or not request.is_rt

    def expect(self, num_prefilling: int, num_ready: int, now: float) -> None:
        self._mixing.expect(num_prefilling, num_ready, now)

    def plan(self, at: DecodeBoundary) -> None:
        self._mixing.look(at)
        self.preempt(at, *self._eviction.choose(at))
        self._admission.admit_before_iteration(at)
        fill(at, self._mixing, self._time)
        self._admission.admit_beside_iteration(at)

    def took(self, seconds: float) -> None:
        self._mixing.took(seconds)
        self._time.took(seconds)
