"""Which requests are admitted to a decode instance, and which are evicted from it. Pure.

- **Admission.** Candidate requests in order, and once there are none the candidate batch, while the running one is
  below its fill mark. Real time (RT) goes before best effort (BE), which leaves headroom.
- **Eviction.** A victim runs on until it needs a new block; from then on it stands still until there are blocks for it
  in the pool. Where RT finds too few blocks, BE is evicted.
- **Victims.** BE goes before RT. Requests of BE whose job can wait go before those which have to run on; then those
  with the fewest blocks to move (the blocks which the pool does not have yet) per token that is still to come. The
  longest request of the older batch is the first RT to go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.decode.rt_demand import RtDemand
from alignedserve.scheduling.policies.aligned.decode.slo_scheduler import DecodeSloScheduler

# This marks best effort that was admitted on credit: it is not evicted for real time.
OWED = "owed"


class Admission:
    def __init__(self, config: SchedulingConfig, slo: DecodeSloScheduler, demand: RtDemand) -> None:
        self._config = config
        self._slo = slo
        self._demand = demand

    # ---- when -------------------------------------------------------------------------------------------------------

    def admit_before_iteration(self, at: DecodeBoundary) -> None:
        """Admits real time, whose KV an iteration may wait for."""
        if self._slo.is_be_owed and not _is_be_started(at):
            self._admit_owed(at)
        if any(request.num_pooled for request in self._admit(at, is_rt=True)):
            self._demand.pulls()

    def admit_beside_iteration(self, at: DecodeBoundary) -> None:
        is_rt_waiting = any(request.is_rt for request in chain(at.requests, at.batch))
        # An instance that runs nothing would not be asked again.
        may_pull = not at.running or self._demand.may_pull_be()
        if may_pull and not is_rt_waiting:
            self._admit(at, is_rt=False)

    def _admit(self, at: DecodeBoundary, is_rt: bool) -> list[DecodeRequest]:
        return decoding.admit_while(at, self._config, is_rt, lambda request: self._has_room(at, request))

    def _admit_owed(self, at: DecodeBoundary) -> None:
        """Admits one best-effort request, though real time waits."""
        for scheduled in chain(at.requests, at.batch):
            if not scheduled.is_rt and self._fits(at, scheduled):
                scheduled.mark = OWED
                at.admit(scheduled)
                return

    # ---- whether there is room --------------------------------------------------------------------------------------

    def _has_room(self, at: DecodeBoundary, newcomer: DecodeRequest) -> bool:
        """Best effort leaves headroom, unless it is alone: then it may take all, because it can be evicted for real
        time."""
        if newcomer.is_rt:
            growth = at.growth(decoding.num_ahead(self._config), is_rt=True)
            growth += at.growth(self._config.evict_ahead, is_rt=False)
            needed = decoding.needed(at, newcomer, self._config) + decoding.watermark(at, self._config)
            return at.num_free_slots > 0 and needed + growth <= at.num_free_blocks
        if not (at.running or at.arriving):
            return self._fits(at, newcomer)
        has_slot = at.num_free_slots > self._demand.num_headroom_slots
        return has_slot and self._fits(at, newcomer, self._demand.num_headroom_blocks)

    def _fits(self, at: DecodeBoundary, newcomer: DecodeRequest, num_left: int = 0) -> bool:
        return decoding.has_room(at, newcomer, self._config, num_left)


def _is_be_started(at: DecodeBoundary) -> bool:
    return any(not request.is_rt for request in chain(at.running, at.arriving))


class Eviction:
    def __init__(self, config: SchedulingConfig, slo: DecodeSloScheduler, demand: RtDemand) -> None:
        self._config = config
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
        return victims, self._choose_for_rt(at, victims, missing)

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
