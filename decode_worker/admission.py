"""Who is admitted: candidate requests in order, and once there are none the candidate batch, while it is below its fill
mark. Pure.

Admission leaves the blocks that all who run, the newcomer too, need for `admit_ahead` iterations: more than
`evict_ahead`, or the same request would be evicted soon after. RT is admitted before BE, which leaves headroom.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from alignedserve.decode_worker.candidates import Candidates
from alignedserve.decode_worker.holders import Holders
from alignedserve.decode_worker.members import Member
from alignedserve.decode_worker.mixing import Mixing
from alignedserve.decode_worker.options import DecodeOptions
from alignedserve.messages import InstanceLimits, Work


class Admission:
    def __init__(
        self,
        limits: InstanceLimits,
        options: DecodeOptions,
        candidates: Candidates,
        holders: Holders,
        mixing: Mixing | None,
    ) -> None:
        self._limits = limits
        self._options = options
        self._candidates = candidates
        self._holders = holders
        self._mixing = mixing

    # ---- when -------------------------------------------------------------------------------------------------------

    def admit_before_iteration(self) -> list[Work]:
        """Real time, whose KV an iteration may wait for."""
        mixing = self._mixing
        if mixing is None:
            return []
        pulls = self._admit_owed() if mixing.is_be_owed and not self._is_be_started else []
        pulls += self._admit(is_rt=True)
        if any(work.deadlines.is_rt for work in pulls):
            mixing.pulls_rt()
        return pulls

    def admit_beside_iteration(self) -> list[Work]:
        if not self._options.discipline.has_classes:
            return self._admit(is_rt=None)
        pulls = self._admit(is_rt=True) if self._mixing is None else []
        is_rt_waiting = any(True for _ in self._candidates.rt)
        # an instance that runs nothing would not be asked again
        may_pull = self._mixing is None or not self._holders.running or self._mixing.may_pull_be()
        if may_pull and not is_rt_waiting:
            pulls += self._admit(is_rt=False)
        return pulls

    # ---- in which order ---------------------------------------------------------------------------------------------

    def _admit(self, is_rt: bool | None) -> list[Work]:
        """Of one class, or of both (None)."""
        candidates = self._candidates
        pulls = self._admit_from(candidates.requests, is_rt, math.inf)
        if not any(is_rt in (None, member.is_rt) for member in candidates.requests):
            mark = self._options.fill_mark * self._limits.num_blocks
            pulls += self._admit_from(candidates.batch, is_rt, mark)
        return pulls

    def _admit_from(self, members: Iterable[Member], is_rt: bool | None, fill_mark: float) -> list[Work]:
        pulls = []
        for member in [each for each in members if is_rt in (None, each.is_rt)]:
            if not self._has_room(member) or self._limits.num_blocks - self._holders.num_free >= fill_mark:
                break
            pulls.append(self._admit_one(member))
        return pulls

    def _admit_owed(self) -> list[Work]:
        """One best-effort request, though real time waits."""
        for member in self._candidates:
            if not member.is_rt and self._holders.num_free_slots > 0 and self._fits(member):
                member.is_owed = True
                return [self._admit_one(member)]
        return []

    def _admit_one(self, member: Member) -> Work:
        self._candidates.take(member)
        self._holders.admit(member)
        return member.work

    # ---- whom there is room for -------------------------------------------------------------------------------------

    @property
    def _is_be_started(self) -> bool:
        holders = self._holders
        return any(
            not each.is_rt for members in (holders.running, holders.pulling) for each in members.values()
        )

    def _has_room(self, newcomer: Member) -> bool:
        """Best effort leaves headroom, unless it is alone: then it may take all. For real time it can give it up."""
        mixing, holders = self._mixing, self._holders
        if mixing is None:
            return holders.num_free_slots > 0 and self._fits(newcomer)
        if newcomer.is_rt:
            growth = holders.growth_of_class(True, self._options.admit_ahead)
            growth += holders.growth_of_class(False, self._options.evict_ahead)
            needed = holders.member_growth(newcomer, self._options.admit_ahead)
            return holders.num_free_slots > 0 and needed + growth <= holders.num_free
        if not (holders.running or holders.pulling):
            return holders.num_free_slots > 0 and self._fits(newcomer)
        return holders.num_free_slots > mixing.num_headroom_slots and self._fits(
            newcomer, mixing.num_headroom_blocks
        )

    def _fits(self, newcomer: Member, num_left: int = 0) -> bool:
        ahead, holders = self._options.admit_ahead, self._holders
        needed = holders.member_growth(newcomer, ahead) + num_left
        return needed <= holders.num_free and needed + holders.growth(ahead) <= holders.num_free
