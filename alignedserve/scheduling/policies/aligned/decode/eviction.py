"""Chooses the requests that are evicted from a decode instance. Pure.

A victim continues to run until it needs a new block. Then it waits until the pool has blocks for it. There are three
reasons to evict:

- **The others grow.** Best effort (BE) is evicted before real time (RT). BE that can wait within the window of its job
  goes first. It is sorted by the number of blocks to move (those that the pool lacks) per token still to come, fewest
  first. RT goes by batch, the oldest first, and within a batch the longest request first.
- **RT waits for blocks or a slot, or might arrive.** BE is evicted in the same order.
- **RT waits and would be late.** Other RT is evicted if it has more slack, even after its KV has been saved and loaded
  again. A request with slack is ahead of its objective, and loses nothing by waiting. The one with the most slack goes
  first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.decode.admission import OWED, by_due, needed_s
from alignedserve.scheduling.policies.aligned.decode.rt_demand import RtDemand
from alignedserve.scheduling.policies.aligned.decode.slo_scheduler import DecodeSloScheduler
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestKey

# RT is evicted for waiting RT only if the slack of the latter is below this multiple of the time that an eviction
# takes. With more slack, blocks may still become free by themselves. 2 allows for prediction errors.
SOON = 2.0


class EvictionChoice:
    def __init__(
        self, config: SchedulingConfig, estimate: Estimate, slo: DecodeSloScheduler, demand: RtDemand
    ) -> None:
        self._config = config
        self._estimate = estimate
        self._slo = slo
        self._demand = demand
        # The predicted seconds of an iteration without prompts.
        self._iteration_s = 0.0

    def choose(self, at: DecodeBoundary) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Returns the victims that make room for growth or the next batch, and the victims that make room for RT.

        Eviction for growth leaves at least one running request: the instance can hold any request alone.
        """
        ahead = self._config.evict_ahead
        victims = [] if self._config.preemption_mode == "defer" else _of_earlier_batches(at)
        missing = at.growth(ahead) - at.num_free_blocks - at.num_blocks_to_come
        missing -= sum(at.growth_of(each, ahead) for each in victims) + at.num_freed_together(victims)
        if missing > 0:
            leaving = {each.key for each in victims}
            staying = [each for each in at.running if each.key not in leaving]
            for scheduled in self._in_order(at, staying)[:-1]:
                if missing > 0:
                    victims.append(scheduled)
                    missing -= at.num_freed(scheduled) + at.growth_of(scheduled, ahead)
        if self._config.preemption_mode == "defer":
            return victims, []
        for_rt = self._choose_for_rt(at, victims, missing)
        return victims, [*for_rt, *self._choose_patient(at, [*victims, *for_rt])]

    def _choose_for_rt(
        self, at: DecodeBoundary, victims: Sequence[DecodeRequest], missing: int
    ) -> list[DecodeRequest]:
        """Returns the BE requests that are evicted for waiting RT, or to restore headroom if none waits.

        `missing` is the number of blocks that the running requests lack; if negative, blocks are to spare.
        """
        chosen = {request.key for request in victims}
        be = [each for each in at.running if not (each.is_rt or each.mark is OWED or each.key in chosen)]
        if not be:
            return []
        most_blocks = at.num_freed_together(be) - missing
        candidates = [each for each in at.requests if each.is_rt and not decoding.should_wait(at, each)]
        waiting = by_due(candidates, self._estimate, at.now)
        waiting += [each for each in at.batch if each.is_rt]
        alone_blocks = 0
        if len(be) + len(victims) == len(at.running) and not at.arriving:
            alone_blocks = at.limits.num_blocks
        num_blocks, num_slots = self._needed_for_rt(at, waiting, most_blocks, len(be), alone_blocks)
        is_rt_waiting = num_slots > 0
        if not is_rt_waiting:
            num_blocks, num_slots = self._demand.least_headroom()
            num_blocks += decoding.watermark(at, self._config) if num_slots else 0
        missing += num_blocks
        missing_slots = num_slots - at.num_free_slots - at.num_slots_to_come - len(victims)
        if missing <= 0 and missing_slots <= 0:
            return []
        leaving = self._in_order(at, be)
        if not is_rt_waiting and len(be) == len(at.running):
            # Admission lets a BE request that is alone take everything: the last one would return at once, and not run.
            leaving.pop()
        more: list[DecodeRequest] = []
        for request in leaving:
            if missing <= 0 and missing_slots <= 0:
                break
            more.append(request)
            missing -= at.num_freed(request)
            missing_slots -= 1
        return more

    def _needed_for_rt(
        self,
        at: DecodeBoundary,
        waiting: Sequence[DecodeRequest],
        most_blocks: int,
        most_slots: int,
        alone_blocks: int,
    ) -> tuple[int, int]:
        """Returns the numbers of blocks and slots for as many of these requests, in order, as can be admitted.

        Counts as `Admission` does. Otherwise a request might be refused there while nothing is evicted for it here.
        `most_blocks` and `most_slots` are what evicting all BE would give. `alone_blocks` is the number of blocks for a
        request that runs alone; 0 unless all others can leave.
        """
        if not waiting:
            return 0, 0
        ahead, num_blocks, num_slots = decoding.num_ahead(self._config), 0, 0
        most_slots += at.num_free_slots + at.num_slots_to_come
        reserve = at.growth(ahead, is_rt=True) - at.growth(self._config.evict_ahead, is_rt=True)
        watermark = decoding.watermark(at, self._config)
        first = at.growth_of(waiting[0], ahead)
        if reserve + watermark + first > most_blocks and first <= alone_blocks:
            # The first one fits if all others leave.
            return most_blocks, 1
        reserve += watermark
        for request in waiting:
            needed = at.growth_of(request, ahead)
            if reserve + num_blocks + needed > most_blocks or num_slots >= most_slots:
                break
            num_blocks, num_slots = num_blocks + needed, num_slots + 1
        return (reserve + num_blocks, num_slots) if num_slots else (0, 0)

    def _choose_patient(self, at: DecodeBoundary, leaving: Sequence[DecodeRequest]) -> list[DecodeRequest]:
        """Returns the requests that are evicted for RT without room that would soon be late: the rest of BE, then RT
        with slack.

        Follows the order of admission, which stops at the first request that does not fit. So it stops at the first RT
        request without room that can wait, that is late in any case, or that evictions can't make room for.
        """
        waiting = [each for each in at.requests if each.is_rt and not decoding.should_wait(at, each)]
        if not waiting:
            return []
        room = decoding.RoomToCome(at, self._config, leaving)
        gone = {each.key for each in leaving}
        ready, behind = at.ready_and_pending()
        lengths = [each.num_read for each in ready]
        self._iteration_s = self._estimate.iteration([], lengths) if lengths else 0.0
        # The chunks of RT that is computed before the request.
        ahead = [(each.num_cached, each.num_pending) for each in behind if each.is_rt]
        chosen: list[DecodeRequest] = []
        for request in by_due(waiting, self._estimate, at.now):
            may_leave: list[DecodeRequest] = []
            slack_s = math.inf
            if not room.fits(request):
                slack_s = request.slack_s(at.now) - needed_s(request, self._estimate, ahead, lengths)
                if slack_s < 0:
                    break
                may_leave = self._may_leave(at, slack_s, gone)
            more = room.make(request, may_leave, only_needed=True)
            if more is None or not self._is_time(at, more, slack_s):
                break
            gone.update(each.key for each in more)
            chosen += more
            ahead.append((request.num_cached, request.num_pending))
        return chosen

    def _may_leave(self, at: DecodeBoundary, slack_s: float, gone: set[RequestKey]) -> list[DecodeRequest]:
        """Returns the requests that may be evicted for RT with this slack: BE in order, then RT with more slack, the
        most first."""
        staying = [each for each in at.running if each.key not in gone]
        be = [each for each in staying if not (each.is_rt or each.mark is OWED)]
        patient = [
            (not at.was_evicted(each), -spare_s, number, each)
            for number, each in enumerate(staying)
            if each.is_rt
            and each.stream_slack_s(at.now) > slack_s
            and (at.was_evicted(each) or self._has_earned(each))
            and (spare_s := each.stream_slack_s(at.now) - self._return_s(each)) > slack_s
        ]
        return [*self._in_order(at, be), *(each for *_, each in sorted(patient))]

    def _is_time(self, at: DecodeBoundary, leaving: Sequence[DecodeRequest], slack_s: float) -> bool:
        """Returns whether the RT of these has to leave now, for a request with this slack that will then be in time.

        An eviction takes two iterations, one until the order and one to reserve blocks in the pool, and the copies of
        KV, one after the other. KV that is computed again is dropped at once.
        """
        if not any(each.is_rt for each in leaving):
            return True
        order_s, copies_s, is_named = 2 * self._iteration_s, 0.0, True
        if self._config.preemption_mode == "swap":
            copies_s = sum(self._estimate.fetch(each.num_cached - each.num_pooled) for each in leaving)
            is_named = all(map(at.was_evicted, leaving))
        leave_s = order_s + copies_s
        # At the next boundary it might be too late: with prompts, an iteration takes longer than predicted here.
        is_soon = slack_s < max(SOON * leave_s, self._slo.last_s + leave_s)
        return is_soon and slack_s >= (copies_s if is_named else leave_s)

    def _has_earned(self, request: DecodeRequest) -> bool:
        """Returns whether the request ran here for at least the time that its eviction and return take."""
        num_tokens = request.num_output - request.num_brought
        return num_tokens > 0 and num_tokens * self._iteration_s >= self._return_s(request)

    def _return_s(self, request: DecodeRequest) -> float:
        return decoding.return_s(request, self._estimate, self._config.preemption_mode == "recompute")

    def _in_order(self, at: DecodeBoundary, requests: Iterable[DecodeRequest]) -> list[DecodeRequest]:
        return by_worth(requests, at, self._slo.is_pressed)


def _of_earlier_batches(at: DecodeBoundary) -> list[DecodeRequest]:
    """Returns the running BE requests with batches that the next batch replaces."""
    if not at.first_batch_to_stay:
        return []
    return [each for each in at.running if 0 < each.batch < at.first_batch_to_stay and not each.is_rt]


def by_worth(
    requests: Iterable[DecodeRequest], at: DecodeBoundary, is_pressed: Callable[[DecodeRequest], bool]
) -> list[DecodeRequest]:
    """Returns the requests in order of eviction. Those already chosen at the last boundary stay in front."""
    span = at.limits.span

    def order(request: DecodeRequest) -> tuple[bool, bool, bool, float, int]:
        is_new = not at.was_evicted(request)
        if request.is_rt:
            return is_new, True, False, request.batch, -request.num_tokens
        # The number of whole columns that the pool has.
        end = request.num_pooled // span.block_size
        num_to_move = request.num_blocks - span.num_blocks(min(request.num_passed, end), end)
        return is_new, False, is_pressed(request), num_to_move / request.num_left, -request.num_blocks

    return sorted(requests, key=order)
