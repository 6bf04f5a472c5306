"""The prefill instances' part of `aligned`. At an iteration boundary it starts prompts, the most urgent first, and cuts
the iteration's chunks (`slo_scheduler.py`). Real time (RT) and best effort (BE) share the instance:

- **Time** (`slo_scheduler.py`). An iteration of BE is bounded by a share of the tightest recent TTFT objective. One of
  RT is bounded by that objective, or by the time that RT needs for nearly its full pace, if that is longer. RT goes
  first. BE joins it as far as RT has time until it is due, or while the iteration becomes hardly any longer.
- **Room.** BE starts only while some blocks and a slot stay free for RT. If RT still finds none, BE prompts are
  preempted. Their KV is in the pool, and is not computed again.
- **Credit.** BE credit grows while BE is present. It is spent on BE before RT, unless RT leaves BE more in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import prefilling
from alignedserve.scheduling.boundary import AnyPrefill, PrefillBoundary, PrefillRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.prefill.slo_scheduler import PrefillSloScheduler
from alignedserve.scheduling.policy import PrefillPart
from alignedserve.timing.deadlines import UNSTATED_TTFT_S, due_s, is_demoted, place_s
from alignedserve.timing.estimate import Estimate

InOrder = Callable[[Sequence[PrefillRequest], float], Sequence[PrefillRequest]]


class AlignedPrefill(PrefillPart):
    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate) -> None:
        super().__init__(limits, config)
        self._estimate = estimate
        self._slo = PrefillSloScheduler(limits, config, estimate)

    def in_order(self, requests: Sequence[AnyPrefill], now: float) -> Sequence[AnyPrefill]:
        def order(request: PrefillRequest) -> tuple[bool, float]:
            return not request.is_rt, _place_of(request, self._estimate, now)

        return sorted(requests, key=order)

    def in_turn(self, requests: Sequence[PrefillRequest], at: PrefillBoundary) -> Sequence[PrefillRequest]:
        return prefilling.real_time_first(super().in_turn(requests, at))

    def in_staging_order(self, candidates: Sequence[AnyPrefill]) -> Sequence[AnyPrefill]:
        return prefilling.real_time_first(candidates)

    def is_ahead(self, begun: PrefillRequest, request: PrefillRequest, now: float) -> bool:
        return _is_ahead(begun, request, self._estimate, now)

    def plan(self, at: PrefillBoundary) -> None:
        self._slo.look(at)
        _admit(at, self._slo, self.in_turn(at.waiting, at), self.in_order)
        requests = self.in_turn(at.computing, at)
        for request, count in self._slo.cut(requests, at):
            at.chunk(request, count)


# ---- order -----------------------------------------------------------------------------------------------------------


def _place_of(request: PrefillRequest, estimate: Estimate, now: float) -> float:
    """Returns the sort key of a prompt in its class: its latest start, smallest first. For BE that also allows for the
    time that the answer will take."""
    needed_s = _needed_s(request, estimate)
    return place_s(request.deadlines, request.num_output, needed_s, request.since_s, now)


def _is_ahead(begun: PrefillRequest, request: PrefillRequest, estimate: Estimate, now: float) -> bool:
    """Returns whether `begun` stays ahead of `request`, a prompt with the same prefix that can wait for its KV.

    `begun` needs less time the more it has computed, and that alone moves it back in the order. So it also stays ahead
    if it is due no later and can still be in time.
    """
    if begun.is_rt != request.is_rt:
        return begun.is_rt
    if _place_of(begun, estimate, now) <= _place_of(request, estimate, now):
        return True
    if is_demoted(begun.deadlines, begun.num_output, _needed_s(begun, estimate), now):
        return False
    return _goal_s(begun) <= _goal_s(request) < math.inf


def _goal_s(request: PrefillRequest) -> float:
    due = due_s(request.deadlines, request.num_output)
    return request.since_s + UNSTATED_TTFT_S if due == math.inf and request.is_rt else due


def _needed_s(request: PrefillRequest, estimate: Estimate) -> float:
    needed_s = estimate.iteration([(request.num_computed, request.num_pending)], [])
    if not request.is_rt:
        num_left = max(request.predicted_len - request.num_output, 0)
        needed_s += num_left * estimate.iteration([], [request.num_tokens])
    return needed_s


# ---- admission and preemption ----------------------------------------------------------------------------------------


def _admit(
    at: PrefillBoundary, slo: PrefillSloScheduler, waiting: Sequence[PrefillRequest], in_order: InOrder
) -> None:
    first = at.short_of_blocks
    be = [request for request in waiting if not request.is_rt]
    owed = be[:1] if slo.is_owed and not at.is_be_started else []
    urgent = owed + [request for request in waiting if request.is_rt]
    if first is None or not first.is_rt:
        prefilling.admit_while(at, urgent, prefilling.fits)
    lacking = next((request for request in urgent if _wants_to_start(at, request)), None)
    if first is None and lacking is None:
        prefilling.admit_while(at, be, lambda at, num_blocks: _leaves_headroom(at, slo, num_blocks))
    wanted = first if first is not None and first.is_rt else lacking
    if wanted is not None and wanted.is_rt:
        _make_room(at, slo, wanted, in_order)


def _wants_to_start(at: PrefillBoundary, request: PrefillRequest) -> bool:
    return at.is_waiting(request) and not at.should_wait(request)


def _leaves_headroom(at: PrefillBoundary, slo: PrefillSloScheduler, num_blocks: int) -> bool:
    """Returns whether a BE prompt of `num_blocks` leaves the headroom free. The only BE prompt need not, because it can
    be preempted for RT."""
    if not at.is_be_started:
        return prefilling.fits(at, num_blocks)
    return prefilling.fits(at, num_blocks + slo.num_headroom_blocks) and at.num_free_slots > 1


def _make_room(
    at: PrefillBoundary, slo: PrefillSloScheduler, wanted: PrefillRequest, in_order: InOrder
) -> None:
    """Preempts BE for the RT prompt `wanted`, if that frees enough for it."""
    missing = at.blocks_for(wanted) - at.num_free_blocks - at.num_blocks_to_come
    needs_slot = at.is_waiting(wanted) and at.num_free_slots <= 0
    be = in_order([each for each in at.computing if not each.is_rt], at.now)
    for victim in _victims(be[slo.is_owed :], missing, needs_slot):
        at.preempt(victim)


def _victims(requests: Sequence[PrefillRequest], num_blocks: int, needs_slot: bool) -> list[PrefillRequest]:
    """Returns prompts that together hold `num_blocks` blocks, and a slot if one is needed; none if all of them do not.

    Takes those with the fewest tokens to load again first, and among equals the later ones in `requests`.
    """
    in_order = sorted(enumerate(requests), key=lambda each: (each[1].num_computed, -each[0]))
    chosen: list[PrefillRequest] = []
    for _, request in in_order:
        if num_blocks <= 0 and not needs_slot:
            break
        chosen.append(request)
        num_blocks, needs_slot = num_blocks - request.num_blocks, False
    return chosen if num_blocks <= 0 and not needs_slot else []
