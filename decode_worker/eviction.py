"""How many are to leave, and when; who they are says `victims.py`. Pure.

Eviction takes the router a moment (it has to find room in the pool), so victims are named `evict_ahead` iterations
before blocks run out. A victim runs on while that takes no new block; it stands still from then until its Evict order
comes. Where real time (RT) finds no room, best effort (BE) makes some.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alignedserve.decode_worker.candidates import Candidates
from alignedserve.decode_worker.holders import Holders
from alignedserve.decode_worker.members import Member
from alignedserve.decode_worker.mixing import Mixing
from alignedserve.decode_worker.options import DecodeOptions
from alignedserve.decode_worker.victims import by_length, by_worth
from alignedserve.types import RequestKey


class Eviction:
    def __init__(
        self,
        block_size: int,
        options: DecodeOptions,
        candidates: Candidates,
        holders: Holders,
        mixing: Mixing | None,
    ) -> None:
        self._block_size = block_size
        self._options = options
        self._candidates = candidates
        self._holders = holders
        self._mixing = mixing
        # as of the last choice
        self.named: frozenset[RequestKey] = frozenset()

    def choose(self) -> list[RequestKey]:
        """At least one request is left to run: whatever it needs, the instance holds."""
        holders, ahead = self._holders, self._options.evict_ahead
        missing = holders.growth(ahead) - holders.num_free - holders.num_blocks_to_come
        victims: dict[RequestKey, None] = {}
        for member in self._in_order(holders.running.values())[:-1] if missing > 0 else ():
            if missing > 0:
                victims[member.key] = None
                missing -= member.num_blocks + holders.member_growth(member, ahead)
        if self._mixing:
            self._choose_for_rt(self._mixing, victims, missing)
        self.named = frozenset(victims)
        return [*victims]

    def _choose_for_rt(self, mixing: Mixing, victims: dict[RequestKey, None], missing: int) -> None:
        """Best effort that makes room for real time that waits, or for the next one that comes.

        `missing`: blocks, before that; below zero, so many are to spare.
        """
        holders = self._holders
        be = [
            each
            for each in holders.running.values()
            if not (each.is_rt or each.is_owed or each.key in victims)
        ]
        if not be:
            return
        most_blocks = sum(each.num_blocks for each in be) - missing
        num_blocks, num_slots = self._needed_for_rt([*self._candidates.rt], most_blocks, len(be))
        if not num_slots:
            num_blocks, num_slots = mixing.least_headroom()
        missing += num_blocks
        missing_slots = num_slots - holders.num_free_slots - holders.num_slots_to_come - len(victims)
        for member in self._in_order(be) if missing > 0 or missing_slots > 0 else ():
            if missing <= 0 and missing_slots <= 0:
                break
            victims[member.key] = None
            missing -= member.num_blocks
            missing_slots -= 1

    def _needed_for_rt(self, waiting: Sequence[Member], most_blocks: int, most_slots: int) -> tuple[int, int]:
        """Blocks and slots for these, in order, as far as so many can be had."""
        if not waiting:
            return 0, 0
        holders, ahead, num_blocks, num_slots = self._holders, self._options.admit_ahead, 0, 0
        most_slots += holders.num_free_slots + holders.num_slots_to_come
        reserve = holders.growth_of_class(True, ahead)
        reserve -= holders.growth_of_class(True, self._options.evict_ahead)
        for member in waiting:
            needed = holders.member_growth(member, ahead)
            if reserve + num_blocks + needed > most_blocks or num_slots >= most_slots:
                break
            num_blocks, num_slots = num_blocks + needed, num_slots + 1
        return (reserve + num_blocks, num_slots) if num_slots else (0, 0)

    def _in_order(self, members: Iterable[Member]) -> list[Member]:
        if self._mixing is None:
            return by_length(members, self.named, self._options.discipline.has_classes)
        return by_worth(members, self.named, self._block_size, self._mixing.is_pressed)
