"""The decode instances' part of `aligned`, also for colocated instances, where prompts are candidates too.

A boundary has the running batch R, candidate requests Q (which may join R) and the candidate batch B (which runs next):

1. `eviction.py` chooses victims if R will not fit, or real time (RT) finds no room.
2. `admission.py` admits RT before best effort (BE), and Q before B. B waits until R is below its fill mark.
3. `slo_scheduler.py` fills the next iteration with RT, and with as much BE as RT's next tokens allow. The other
   requests sit out: they keep their blocks, and nothing is moved. Without RT all requests run.

All RT runs while its TBT objectives are similar. Otherwise requests that can wait sit out iterations that would be too
long for those that can't (AccelGen, `scheduling/remaining_time.py`).

RT and BE share the instance:

- **Time** (`rt_demand.py`). While RT is about to join, iterations are short. None begins while RT's KV is about to
  arrive.
- **Room.** BE leaves some blocks and a slot free for RT. If RT still finds no room, BE is evicted.
- **Credit.** BE credit grows while BE is present. It is spent on BE beyond what RT allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import AnyDecode, DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.decode.admission import Admission, by_due
from alignedserve.scheduling.policies.aligned.decode.eviction import EvictionChoice
from alignedserve.scheduling.policies.aligned.decode.rt_demand import RtDemand
from alignedserve.scheduling.policies.aligned.decode.slo_scheduler import Chunks, DecodeSloScheduler
from alignedserve.scheduling.policy import DecodePart
from alignedserve.scheduling.remaining_time import RemainingTime
from alignedserve.timing.estimate import Estimate

# The largest ratio between two TBT objectives that count as similar. At 1.25, RT could skip one iteration of five.
ALIKE = 1.25


class AlignedDecode(DecodePart):
    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate) -> None:
        super().__init__(limits, config)
        self._estimate = estimate
        self._time = RemainingTime(limits, estimate)
        self._demand = RtDemand(limits, config)
        self._slo = DecodeSloScheduler(limits, config, estimate, self._demand)
        self._eviction = EvictionChoice(config, estimate, self._slo, self._demand)
        self._admission = Admission(config, estimate, self._slo, self._demand)

    def in_order(self, requests: Sequence[AnyDecode], now: float) -> Sequence[AnyDecode]:
        return decoding.real_time_first(requests)

    def is_ahead(self, begun: DecodeRequest, request: DecodeRequest, now: float) -> bool:
        """Returns False only if RT would wait for BE."""
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
        ready, behind = at.ready_and_pending()
        rt = self._in_time([request for request in ready if request.is_rt], at.now)
        be = [request for request in ready if not request.is_rt]
        if behind or be:
            self._fill_mixed(at, rt, be, behind)
        else:
            at.run_many(rt)
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
        """Plans RT, then as much BE as RT allows, or holds the iteration for RT's KV. Requests without a block for
        their next token don't run."""
        slo = self._slo
        has_prompts = any(each.is_rt for each in behind)
        if hold_s := slo.hold_s([each for each in at.running if each.is_rt], has_prompts):
            at.hold(hold_s)
            return
        rt = at.run_many(rt)
        rt_behind = by_due((request for request in behind if request.is_rt), self._estimate, at.now)
        bound_s = slo.bound_s([*rt, *rt_behind])
        lengths = [request.num_read for request in rt]
        # With no RT decoding or about to, an RT prompt delays only the prompts behind it.
        is_alone = not (rt or at.arriving or self._demand.is_near)
        prompts_s = math.inf if is_alone else slo.bound_of_prompts_s(rt)
        chunks = self._catch_up(at, rt_behind, [], lengths, prompts_s)
        chosen = at.run_many(slo.choose(rt, be, chunks, bound_s))
        lengths += [request.num_read for request in chosen]
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
        """Plans chunks of prompts, and of requests that lost their KV, as far as tokens, blocks and time allow. Returns
        the chunks."""
        taken: list[tuple[int, int]] = []
        for request in behind:
            most = at.limits.max_prefill_chunk or at.num_tokens_left
            count = min(request.num_pending, at.num_tokens_left, most)
            if count > 0:
                count = self._slo.most_tokens(request, count, [*chunks, *taken], lengths, bound_s)
            if count > 0 and at.chunk(request, count):
                taken.append((request.num_cached, count))
        return taken
