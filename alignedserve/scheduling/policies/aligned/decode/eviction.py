"""Which requests are evicted from a decode instance. Pure.

A victim runs on until it needs a new block; from then on it waits until the pool has blocks for it. Requests are
evicted

- so that the others can grow. Best effort (BE) goes before real time (RT), and of it first what can wait for the window
  of its job, then what has the fewest blocks to move (those that the pool does not have yet) per token that is still to
  come. The longest request of the older batch is the first RT to go;
- for RT that waits for blocks or a slot, or for the next that arrives: BE, in the same order;
- for RT that waits and would be late: other RT, if it has more slack even after its KV was saved and loaded again. A
  request with slack was ahead of its objective, and loses nothing by waiting. The one with the most slack goes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.decode.admission import OWED
from alignedserve.scheduling.policies.aligned.decode.rt_demand import RtDemand
from alignedserve.scheduling.policies.aligned.decode.slo_scheduler import DecodeSloScheduler
from alignedserve.timing.estimate import Estimate


class Eviction:
    def __init__(
        self, config: SchedulingConfig, estimate: Estimate, slo: DecodeSloScheduler, demand: RtDemand
    ) -> None:
        self._config = config
        self._estimate = estimate
        self._slo = slo
        self._demand = demand

    def choose(self, at: DecodeBoundary) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Returns those that leave so that the rest can grow, or for the next batch, and those that leave for RT. But
        for the next batch at least one request is left to run: whatever it needs, the instance holds."""
        ahead = self._config.evict_ahead
        victims = [] if self._config.preemption_mode == "defer" else _of_earlier_batches(at)
        missing = at.growth(ahead) - at.num_free_blocks - at.num_blocks_to_come
        missing -= sum(each.num_blocks + at.growth_of(each, ahead) for each in victims)
        if missing > 0:
            leaving = {each.key for each in victims}
            staying = [each for each in at.running if each.key not in leaving]
            for scheduled in self._in_order(at, staying)[:-1]:
                if missing > 0:
                    victims.append(scheduled)
                    missing -= scheduled.num_blocks + at.growth_of(scheduled, ahead)
        for_rt = self._choose_for_rt(at, victims, missing)
        return victims, [*for_rt, *self._choose_patient(at, [*victims, *for_rt])]

    def _choose_for_rt(
        self, at: DecodeBoundary, victims: Sequence[DecodeRequest], missing: int
    ) -> list[DecodeRequest]:
        """Chooses best effort that is evicted for real time which waits, or for the next that comes.

        `missing` is the number of blocks that are missing before that; a negative number is to spare.
        """
        chosen = {request.key for request in victims}
        be = [each for each in at.running if not (each.is_rt or each.mark is OWED or each.key in chosen)]
        if not be:
            return []
        most_blocks = sum(each.num_blocks for each in be) - missing
        waiting = [request for request in chain(at.requests, at.batch) if request.is_rt]
        alone_blocks = 0
        if len(be) + len(victims) == len(at.running) and not at.arriving:
            alone_blocks = (
                sum(each.num_blocks for each in at.running) + at.num_free_blocks + at.num_blocks_to_come
            )
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
            # Admission lets best effort that is alone take all: the last would come back at once, and never run.
            leaving.pop()
        more: list[DecodeRequest] = []
        for request in leaving:
            if missing <= 0 and missing_slots <= 0:
                break
            more.append(request)
            missing -= request.num_blocks
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
        """Returns the numbers of blocks and slots for these requests, in order, as far as they can be had. It counts as
        `Admission` does: otherwise a request might be refused there while nothing leaves for it here. `alone_blocks`:
        the number that there are for one alone, if all others can leave."""
        if not waiting:
            return 0, 0
        ahead, num_blocks, num_slots = decoding.num_ahead(self._config), 0, 0
        most_slots += at.num_free_slots + at.num_slots_to_come
        reserve = at.growth(ahead, is_rt=True) - at.growth(self._config.evict_ahead, is_rt=True)
        watermark = decoding.watermark(at, self._config)
        first = at.growth_of(waiting[0], ahead)
        if reserve + watermark + first > most_blocks and first <= alone_blocks:
            # There is room for the first one if all others leave.
            return most_blocks, 1
        reserve += watermark
        for request in waiting:
            needed = at.growth_of(request, ahead)
            if reserve + num_blocks + needed > most_blocks or num_slots >= most_slots:
                break
            num_blocks, num_slots = num_blocks + needed, num_slots + 1
        return (reserve + num_blocks, num_slots) if num_slots else (0, 0)

    def _choose_patient(self, at: DecodeBoundary, leaving: Sequence[DecodeRequest]) -> list[DecodeRequest]:
        """Chooses RT with slack that is evicted for RT which finds no room, and would be late without it. What is late
        already waits for its turn: admission takes nothing that stands behind it, so that nothing leaves for that."""
        waiting = [each for each in chain(at.requests, at.batch) if each.is_rt]
        if not waiting:
            return []
        room = decoding.RoomToCome(at, self._config, leaving)
        chosen: list[DecodeRequest] = []
        patient: list[tuple[float, DecodeRequest]] | None = None
        for request in waiting:
            may_leave: list[DecodeRequest] = []
            if not room.fits(request):
                slack_s = request.slack_s(at.now) - self._needed_s(request)
                if slack_s < 0:
                    break
                patient = self._patient(at, leaving) if patient is None else patient
                may_leave = [each for spare_s, each in patient if spare_s > slack_s]
            more = room.make(request, may_leave)
            if more is None:
                break
            if patient is not None and more:
                patient = [each for each in patient if each[1] not in more]
            chosen += more
        return chosen

    def _patient(
        self, at: DecodeBoundary, leaving: Sequence[DecodeRequest]
    ) -> list[tuple[float, DecodeRequest]]:
        """Returns the RT that may leave, with the seconds that each can spare once its way out and back is counted; the
        most first. A request yields at least one token between two evictions."""
        gone = {each.key for each in leaving}
        may_leave = [
            (self._spare_s(each, at.now), each)
            for each in at.running
            if each.is_rt and each.key not in gone and _has_yielded(each)
        ]
        return sorted(may_leave, key=lambda each: each[0], reverse=True)

    def _needed_s(self, request: DecodeRequest) -> float:
        """Returns the seconds that a candidate needs for its next token, once it is admitted."""
        fetching_s = self._estimate.fetch(request.num_pooled) if request.num_pooled else 0.0
        return fetching_s + self._estimate.iteration([(request.num_cached, request.num_pending)], [])

    def _spare_s(self, request: DecodeRequest, now: float) -> float:
        """Returns the seconds that a running request can do without the instance. What is lost has all the time."""
        if request.is_lost(now):
            return math.inf
        is_recomputed = self._config.preemption_mode == "recompute"
        return request.slack_s(now) - decoding.return_s(request, self._estimate, is_recomputed)

    def _in_order(self, at: DecodeBoundary, requests: Iterable[DecodeRequest]) -> list[DecodeRequest]:
        return by_worth(requests, at, self._slo.is_pressed)


def _has_yielded(request: DecodeRequest) -> bool:
    """Whether it has yielded a token since it arrived here."""
    is_computed = request.num_output > 0 and request.num_pending == 1
    return is_computed and request.num_cached > request.num_pooled


def _of_earlier_batches(at: DecodeBoundary) -> list[DecodeRequest]:
    """Best effort that leaves because the next batch runs in place of its own."""
    if not at.first_batch_to_stay:
        return []
    return [each for each in at.running if 0 < each.batch < at.first_batch_to_stay and not each.is_rt]


def by_worth(
    requests: Iterable[DecodeRequest], at: DecodeBoundary, is_pressed: Callable[[DecodeRequest], bool]
) -> list[DecodeRequest]:
    """Returns the requests in the order in which they leave. Those whose eviction was wanted at the last boundary stay
    in front."""
    span = at.limits.span

    def order(request: DecodeRequest) -> tuple[bool, bool, bool, float, int]:
        is_new = not at.was_evicted(request)
        if request.is_rt:
            return is_new, True, False, request.batch, -request.num_tokens
        # The columns that the pool has.
        end = request.num_pooled // span.block_size
        num_to_move = request.num_blocks - span.num_blocks(min(request.num_passed, end), end)
        return is_new, False, is_pressed(request), num_to_move / request.num_left, -request.num_blocks

    return sorted(requests, key=order)
