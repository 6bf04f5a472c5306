"""How many requests leave, and when; `victims.py` decides which. Pure.

A victim runs on until it needs a new block; from then on it stands still until there are blocks for it in the pool.
Where real time (RT) finds too few blocks, best effort (BE) is evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.decode.mixing import Mixing
from alignedserve.scheduling.policies.aligned.decode.victims import OWED, by_worth


class Eviction:
    def __init__(self, config: SchedulingConfig, mixing: Mixing) -> None:
        self._config = config
        self._mixing = mixing

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

        `missing` is the number of blocks that are missing before that; if it is negative, so many are to spare.
        """
        chosen = {request.key for request in victims}
        be = [each for each in at.running if not (each.is_rt or each.mark is OWED or each.key in chosen)]
        if not be:
            return []
        most_blocks = sum(each.num_blocks for each in be) - missing
        waiting = [request for request in chain(at.requests, at.batch) if request.is_rt]
        can_be_alone = len(be) == len(at.running) and not at.arriving
        num_blocks, num_slots = self._needed_for_rt(at, waiting, most_blocks, len(be), can_be_alone)
        is_rt_waiting = num_slots > 0
        if not is_rt_waiting:
            num_blocks, num_slots = self._mixing.least_headroom()
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
        can_be_alone: bool,
    ) -> tuple[int, int]:
        """Returns the numbers of blocks and slots for these requests, in order, as far as they can be had. It counts as
        `Admission` does: otherwise a request might be refused there while nothing leaves for it here."""
        if not waiting:
            return 0, 0
        ahead, num_blocks, num_slots = decoding.num_ahead(self._config), 0, 0
        most_slots += at.num_free_slots + at.num_slots_to_come
        reserve = at.growth(ahead, is_rt=True) - at.growth(self._config.evict_ahead, is_rt=True)
        watermark = decoding.watermark(at, self._config)
        first = at.growth_of(waiting[0], ahead)
        if reserve + watermark + first > most_blocks >= first and can_be_alone:
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
        return by_worth(requests, at, self._mixing.is_pressed)


def _of_earlier_batches(at: DecodeBoundary) -> list[DecodeRequest]:
    """Best effort that leaves because the next batch runs in place of its own."""
    if not at.first_batch_to_stay:
        return []
    return [each for each in at.running if 0 < each.batch < at.first_batch_to_stay and not each.is_rt]
