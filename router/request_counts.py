"""How many requests are in which phase, per tier and per instance. Pure.

Requests are counted as they change, so `/health` takes as long for one request as for thousands.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from alignedserve.router.request_state import RequestState
from alignedserve.types import InstanceId, RequestKey


class _Counted(NamedTuple):
    tier: str
    phase: str
    # The instances that have the request, or a staged copy of its KV.
    instance_ids: frozenset[InstanceId]


class RequestCounts:
    def __init__(self) -> None:
        self._counted: dict[RequestKey, _Counted] = {}
        self._tiers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._instances: defaultdict[InstanceId, Counter[str]] = defaultdict(Counter)

    def update(self, state: RequestState) -> None:
        """Replaces a request's old count with its current one. A finished request is not counted."""
        if old := self._counted.pop(state.key, None):
            self._count(old, -1)
        if not state.is_finished:
            instance_ids = frozenset(each for each in (state.instance_id, state.staged_at) if each)
            self._counted[state.key] = new = _Counted(state.request.tier, state.phase.value, instance_ids)
            self._count(new, 1)

    @property
    def by_phase(self) -> dict[str, int]:
        return dict(sum(self._tiers.values(), Counter()))

    @property
    def by_tier(self) -> dict[str, dict[str, int]]:
        return {tier: dict(+counts) for tier, counts in self._tiers.items() if counts.total()}

    def at_instance(self, instance_id: InstanceId) -> dict[str, int]:
        return dict(+self._instances[instance_id]) if instance_id in self._instances else {}

    def _count(self, counted: _Counted, sign: int) -> None:
        self._tiers[counted.tier][counted.phase] += sign
        for instance_id in counted.instance_ids:
            self._instances[instance_id][counted.phase] += sign
