"""What a decode instance does at an iteration boundary, and a colocated one, where prompts are candidates too.

There are the running batch R, candidate requests Q (which may join R) and the candidate batch B (which runs next):

1. Victims are chosen when R will not fit, or real time finds no room (`eviction.py`).
2. Real time (RT) is admitted before best effort (BE), Q before B, and B once R is below its fill mark (`admission.py`).
3. The next iteration is filled with RT, and with as much BE as RT's next tokens allow (`slo_scheduler.py`). The other
   requests sit out: they keep their blocks, and nothing is moved. Without RT all requests run.

All RT runs as long as its objectives are alike. Else those that can wait sit out iterations which would be too long for
those that can't (AccelGen): `scheduling/remaining_time.py`.

RT and BE share the instance like this:

- **Time.** While RT is about to come, iterations are short, and none begins while its KV is on its way
  (`rt_demand.py`).
- **Room.** BE leaves some blocks and a slot free for RT. When RT finds none all the same, BE is evicted.
- **Credit.** While BE is there, a credit grows, which is spent on BE beyond what RT allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import AnyDecode, DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.decode.admission import Admission, by_due
from alignedserve.scheduling.policies.aligned.decode.eviction import Eviction
from alignedserve.scheduling.policies.aligned.decode.rt_demand import RtDemand
from alignedserve.scheduling.policies.aligned.decode.slo_scheduler import Chunks, DecodeSloScheduler
from alignedserve.scheduling.policies.base import DecodePart
from alignedserve.scheduling.remaining_time import RemainingTime
from alignedserve.timing.estimate import Estimate

# TBT objectives are alike if none is more than this many times as long as another one.
ALIKE = 1.25


class AlignedDecode(DecodePart):
    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate) -> None:
        super().__init__(limits, config)
        self._time = RemainingTime(limits, estimate)
        self._demand = RtDemand(limits, config)
        self._slo = DecodeSloScheduler(limits, config, estimate, self._demand)
        self._eviction = Eviction(config, estimate, self._slo, self._demand)
        self._admission = Admission(config, self._slo, self._demand)

    def in_order(self, requests: Sequence[AnyDecode], now: float) -> Sequence[AnyDecode]:
        return decoding.real_time_first(requests)

    def is_ahead(self, begun: DecodeRequest, request: DecodeRequest, now: float) -> bool:
        """Real time does not wait for best effort."""
        return begun.is_rt or not request.is_rt

    def expect(self, num_prefilling: int, num_ready: int, now: float) -> None:
        self._demand.expect(num_prefilling, num_ready, now)

    def plan(self, at: DecodeBoundary) -> None:
        self._demand.look(at)
        self._slo.look(at)
        self.preempt(at, *self._eviction.choose(at))
        self._admission.admit_before_iteration(at)
        self._fill(at)
        self._admission.admit_beside_iteration(at)

    def took(self, seconds: float) -> None:
        self._slo.took(seconds)
        self._time.took(seconds)

    # ---- the next iteration -----------------------------------------------------------------------------------------

    def _fill(self, at: DecodeBoundary) -> None:
        ready, behind = at.ready_and_behind()
        rt = self._in_time([request for request in ready if request.is_rt], at.now)
        be = [request for request in ready if not request.is_rt]
        if behind or be:
            self._fill_mixed(at, rt, be, behind)
        else:
            at.run_each(rt)
            self._slo.planned(num_be=0)

    def _in_time(self, rt: list[DecodeRequest], now: float) -> list[DecodeRequest]:
        objectives_s = [request.deadlines.tbt_s for request in rt]
        if not rt or max(objectives_s) <= ALIKE * min(objectives_s):
            return rt
        self._time.look(rt, now)
        return self._time.in_time(rt, now)[0]

    def _fill_mixed(
        self,
        at: DecodeBoundary,
        rt: Sequence[DecodeRequest],
        be: Sequence[DecodeRequest],
        behind: Sequence[DecodeRequest],
    ) -> None:
        """Runs real time, then as much of best effort as it allows; of both, requests that have a block for their next
        token."""
        slo = self._slo
        if hold_s := slo.hold_s([each for each in at.running if each.is_rt]):
            at.hold(hold_s)
            return
        rt = at.run_each(rt)
        rt_behind = by_due((request for request in behind if request.is_rt), at.now)
        bound_s = slo.bound_s([*rt, *rt_behind])
        lengths = [request.num_tokens for request in rt]
        # Where nobody decodes, or is about to, prompts of RT hold nobody up but prompts behind them.
        is_alone = not (rt or at.arriving or self._demand.is_near)
        prompts_s = math.inf if is_alone else slo.bound_of_prompts_s(rt)
        chunks = self._catch_up(at, rt_behind, [], lengths, prompts_s)
        chosen = at.run_each(slo.choose(rt, be, chunks, bound_s))
        lengths += [request.num_tokens for request in chosen]
        be_behind = [request for request in behind if not request.is_rt]
        if be_behind:
            bound_s = slo.chunk_bound_s(be_behind[0], rt, chunks, lengths, bound_s)
            taken = self._catch_up(at, be_behind, chunks, lengths, bound_s)
            slo.spent_on_chunks(taken, chunks, lengths)
        slo.planned(num_be=len(chosen))

    def _catch_up(
        self,
        at: DecodeBoundary,
        behind: Iterable[DecodeRequest],
        chunks: Chunks,
        lengths: Sequence[int],
        bound_s: float,
    ) -> Chunks:
        """Computes chunks of requests that lost their KV, as far as tokens, blocks and time allow. Returns them."""
        taken: list[tuple[int, int]] = []
        for request in behind:
            most = at.limits.max_prefill_chunk or at.num_tokens_left
            count = min(request.num_pending, at.num_tokens_left, most)
            if count > 0:
                count = self._slo.most_tokens(request, count, [*chunks, *taken], lengths, bound_s)
            if count > 0 and at.chunk(request, count):
                taken.append((request.num_cached, count))
        return taken
