"""How many requests are in which state: of each class, and at each instance. Pure.

Counted as they change: whoever asks for `/health` is answered as soon beside thousands of them as beside one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from alignedserve.router.request_state import RequestState
from alignedserve.types import InstanceId, RequestKey


class _Seen(NamedTuple):
    tier: str
    phase: str
    # the instances that have it
    places: frozenset[InstanceId]


class RequestCounts:
    def __init__(self) -> None:
        self._seen: dict[RequestKey, _Seen] = {}
        self._tiers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._places: defaultdict[InstanceId, Counter[str]] = defaultdict(Counter)

    def update(self, state: RequestState) -> None:
        """After each change of what is counted. Those that are over are not."""
        places = frozenset(place for place in (state.place, state.staged_at) if place)
        seen = None if state.is_finished else _Seen(state.request.tier, state.phase.value, places)
        if old := self._seen.pop(state.key, None):
            self._count(old, -1)
        if seen:
            self._seen[state.key] = seen
            self._count(seen, 1)

    @property
    def by_phase(self) -> dict[str, int]:
        return dict(sum(self._tiers.values(), Counter()))

    @property
    def by_tier(self) -> dict[str, dict[str, int]]:
        return {tier: dict(+counts) for tier, counts in self._tiers.items() if counts.total()}

    def at_instance(self, instance_id: InstanceId) -> dict[str, int]:
        return dict(+self._places[instance_id]) if instance_id in self._places else {}

    def _count(self, seen: _Seen, sign: int) -> None:
        self._tiers[seen.tier][seen.phase] += sign
        for place in seen.places:
            self._places[place][seen.phase] += sign
