"""In which order prompts go, of both classes. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.prefill_worker.members import Member
from alignedserve.prefill_worker.mixing import Mixing


class Order:
    def __init__(self, has_classes: bool, mixing: Mixing | None) -> None:
        self._has_classes = has_classes
        self._mixing = mixing

    def of(self, members: Iterable[Member], now: float) -> list[Member]:
        """The most urgent first; those that came first among equals."""
        mixing = self._mixing
        if mixing:
            return sorted(members, key=lambda member: mixing.order(member, now))
        if self._has_classes:
            return sorted(members, key=lambda member: not member.is_rt)
        return list(members)

    def is_ahead(self, begun: Member, member: Member, now: float) -> bool:
        """Whether one that has begun will have computed, before the other could, what both need. Real time waits for no
        best effort."""
        if self._mixing:
            return self._mixing.is_ahead(begun, member, now)
        return begun.is_rt or not member.is_rt or not self._has_classes
