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

from collections.abc import Callable, Iterable, Sequence

from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.decode.admission import OWED, by_due
from alignedserve.scheduling.policies.aligned.decode.rt_demand import RtDemand
from alignedserve.scheduling.policies.aligned.decode.slo_scheduler import DecodeSloScheduler
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestKey

# RT leaves for RT whose slack is shorter than this many times the time that leaving takes: by then none has become
# free. Twice allows for what predictions miss.
SOON = 2.0


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
        if self._config.preemption_mode == "defer":
            return victims, []
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
        waiting = [*by_due((each for each in at.requests if each.is_rt), at.now)]
        waiting += [each for each in at.batch if each.is_rt]
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
        """Chooses what is evicted for RT that finds no room, and will be late if it does not find some in a moment:
        the rest of BE, and then RT with slack.

        It goes in the order of admission, which takes nothing that stands behind what it can't take. So it ends at the
        first request that can wait, or is late in any case.
        """
        waiting = [each for each in at.requests if each.is_rt and not decoding.had_better_wait(at, each)]
        room = decoding.RoomToCome(at, self._config, leaving)
        gone = {each.key for each in leaving}
        chosen: list[DecodeRequest] = []
        for request in by_due(waiting, at.now):
            may_leave: list[DecodeRequest] = []
            if not room.fits(request):
                slack_s = request.slack_s(at.now) - self._needed_s(request)
                if slack_s < 0:
                    break
                may_leave = self._may_leave(at, slack_s, gone)
            more = room.make(request, may_leave)
            if more is None:
                break
            gone.update(each.key for each in more)
            chosen += more
        return chosen

    def _may_leave(self, at: DecodeBoundary, slack_s: float, gone: set[RequestKey]) -> list[DecodeRequest]:
        """Returns what may leave for RT that has this slack, in order: BE, and RT with more slack, the most first."""
        staying = [each for each in at.running if each.key not in gone]
        be = [each for each in staying if not (each.is_rt or each.mark is OWED)]
        patient = [
            (not at.was_evicted(each), -spare_s, number, each)
            for number, each in enumerate(staying)
            if each.is_rt
            and each.stream_slack_s(at.now) > slack_s
            and self._is_soon(each, slack_s)
            and self._has_earned(each)
            and (spare_s := each.stream_slack_s(at.now) - self._return_s(each)) > slack_s
        ]
        return [*self._in_order(at, be), *(each for *_, each in sorted(patient))]

    def _needed_s(self, request: DecodeRequest) -> float:
        """Returns the seconds that a candidate needs for its next token, once it is admitted."""
        fetching_s = self._estimate.fetch(request.num_pooled) if request.num_pooled else 0.0
        return fetching_s + self._estimate.iteration([(request.num_cached, request.num_pending)], [])

    def _is_soon(self, request: DecodeRequest, slack_s: float) -> bool:
        """Whether the slack of RT that waits would be used up soon after this request has left: when it is ordered to
        at an iteration's end, reserves blocks in the pool during the next, and is copied."""
        return slack_s < SOON * (
            2 * self._slo.last_s + self._estimate.fetch(request.num_cached - request.num_pooled)
        )

    def _has_earned(self, request: DecodeRequest) -> bool:
        """Whether it ran here at least for as long as it takes to leave and return."""
        num_tokens = request.num_output - request.num_brought
        return num_tokens > 0 and num_tokens * self._slo.last_s >= self._return_s(request)

    def _return_s(self, request: DecodeRequest) -> float:
        return decoding.return_s(request, self._estimate, self._config.preemption_mode == "recompute")

    def _in_order(self, at: DecodeBoundary, requests: Iterable[DecodeRequest]) -> list[DecodeRequest]:
        return by_worth(requests, at, self._slo.is_pressed)


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
