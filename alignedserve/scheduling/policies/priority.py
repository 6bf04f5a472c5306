"""Static priority: like `fcfs`, but real time goes before best effort wherever both wait, and best effort is evicted
first.

This is what serving systems with a priority field do. It is a baseline: running requests stay, however urgent the
waiting ones are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding, prefilling, routing
from alignedserve.scheduling.boundary import (
    AnyDecode,
    AnyPrefill,
    DecodeBoundary,
    DecodeRequest,
    PrefillBoundary,
    PrefillRequest,
)
from alignedserve.scheduling.island import Assign, DecodeView, Island, Room, RoutedRequest
from alignedserve.scheduling.policy import ColocatedPart, DecodePart, Policy, PrefillPart, RouterPart
from alignedserve.scheduling.routing import BEST_EFFORT, REAL_TIME
from alignedserve.timing.estimate import Estimate


class PriorityRouter(RouterPart):
    num_lines = 2

    def line(self, is_rt: bool) -> int:
        return REAL_TIME if is_rt else BEST_EFFORT

    def start(self, island: Island) -> Iterator[RoutedRequest]:
        room = yield from routing.start_line(island, REAL_TIME, self.room(island))
        if island.prefill_queue.is_empty(REAL_TIME) and not routing.has_evicted(island):
            yield from routing.start_line(island, BEST_EFFORT, room)

    def room(self, island: Island) -> Room:
        """Returns how much more may be started."""
        return routing.room_left(island, self.config.prefill_window)

    def hand_over_to(
        self, request: RoutedRequest, views: Sequence[DecodeView], island: Island
    ) -> DecodeView | None:
        """Overtakes best effort."""
        return None if island.decode_queue.real_time else routing.emptiest(request, views)

    def decide(self, island: Island) -> Iterable[Assign]:
        return routing.assign_in_order(routing.real_time_first(island.decode_queue), island.cluster.decodes)


class PriorityPrefill(PrefillPart):
    def in_order(self, requests: Sequence[AnyPrefill], now: float) -> Sequence[AnyPrefill]:
        return prefilling.real_time_first(requests)

    def in_turn(self, requests: Sequence[PrefillRequest], at: PrefillBoundary) -> Sequence[PrefillRequest]:
        return prefilling.real_time_first(super().in_turn(requests, at))

    def in_staging_order(self, candidates: Sequence[AnyPrefill]) -> Sequence[AnyPrefill]:
        return prefilling.real_time_first(candidates)

    def is_ahead(self, begun: PrefillRequest, request: PrefillRequest, now: float) -> bool:
        """Returns False for real time beside best effort, so that it does not wait."""
        return begun.is_rt or not request.is_rt


class PriorityDecode(DecodePart):
    def plan(self, at: DecodeBoundary) -> None:
        self.preempt(at, decoding.victims(at, self.config.evict_ahead, self.in_eviction_order))
        decoding.run_all(at)
        decoding.admit_in_order(at, self.config, is_rt=True)
        if not any(request.is_rt for request in chain(at.requests, at.batch)):
            decoding.admit_in_order(at, self.config, is_rt=False)

    def in_eviction_order(
        self, requests: Sequence[DecodeRequest], at: DecodeBoundary
    ) -> Sequence[DecodeRequest]:
        return decoding.longest_of_older_batch(requests, at, has_classes=True)


class PriorityColocated(ColocatedPart):
    def plan(self, at: DecodeBoundary) -> None:
        self.preempt(at, decoding.victims(at, self.config.evict_ahead, self.in_eviction_order))
        decoding.go_on(at, decoding.real_time_first(at.running))
        decoding.begin_in_order(at, self.config, [each for each in _waiting(at) if each.is_rt])
        if not any(each.is_rt for each in _waiting(at)):
            decoding.begin_in_order(at, self.config, _waiting(at))

    def in_eviction_order(
        self, requests: Sequence[DecodeRequest], at: DecodeBoundary
    ) -> Sequence[DecodeRequest]:
        return sorted(decoding.youngest(requests, at), key=lambda request: request.is_rt)

    def in_order(self, requests: Sequence[AnyDecode], now: float) -> Sequence[AnyDecode]:
        return decoding.real_time_first(requests)

    def is_ahead(self, begun: DecodeRequest, request: DecodeRequest, now: float) -> bool:
        return begun.is_rt or not request.is_rt


def _waiting(at: DecodeBoundary) -> list[DecodeRequest]:
    return [*at.requests, *at.batch]


class Priority(Policy):
    name = "priority"
    summary = "real time first, then in order of arrival"

    def router(self) -> RouterPart:
        return PriorityRouter(self.config)

    def prefill(self, limits: InstanceLimits, estimate: Estimate | None) -> PrefillPart:
        return PriorityPrefill(limits, self.config)

    def decode(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return PriorityDecode(limits, self.config)

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return PriorityColocated(limits, self.config)
