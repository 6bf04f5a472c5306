"""A policy: a name and up to four parts. Whatever a part does not override happens in order of arrival.

A part is used in one process only: the router has its own, and so does each instance. It may keep state as long as its
process lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

from alignedserve.kv.layout import Layout
from alignedserve.protocol.messages import FindNear, FormBatch, InstanceLimits
from alignedserve.scheduling import decoding, prefilling, routing
from alignedserve.scheduling.boundary import (
    AnyDecode,
    AnyPrefill,
    DecodeBoundary,
    DecodeRequest,
    PrefillBoundary,
    PrefillRequest,
)
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.island import (
    Assign,
    DecodeView,
    Island,
    PrefillView,
    RoutedRequest,
    Urgency,
)
from alignedserve.timing.estimate import Estimate


class RouterPart:
    """Decides which prompts start where, and which pooled requests go to which decode instance."""

    # The number of lines of requests that wait for prefill.
    num_lines = 1

    def __init__(self, config: SchedulingConfig) -> None:
        self.config = config

    # ---- prompts -----------------------------------------------------------------------------------------------------

    def line(self, is_rt: bool) -> int:
        """Returns the line in which such a request waits for prefill. Only requests in that line and in earlier ones
        can cause its refusal."""
        return 0

    def urgency(self, request: RoutedRequest, island: Island) -> Urgency:
        """Returns its place in its line."""
        return Urgency(True, request.arrived_s, False)

    def start(self, island: Island) -> Iterator[RoutedRequest]:
        """Starts prompts, and takes them from the queue. The caller may stop before the last one."""
        if not routing.has_evicted(island):
            yield from routing.start_line(island, 0, routing.room_left(island, self.config.prefill_window))

    def place(
        self,
        request: RoutedRequest,
        views: Sequence[PrefillView],
        num_known: Callable[[PrefillView], int],
        island: Island,
    ) -> PrefillView:
        """Returns the instance that computes the prompt. `num_known` returns how many of its tokens may have KV in an
        instance's prefix cache."""
        return min(views, key=lambda view: (view.pending.total - num_known(view), -view.num_free_blocks))

    def pins(self, request: RoutedRequest) -> bool:
        """Returns whether other requests may not take the pool's KV of a prompt that has begun and waits again."""
        return False

    # ---- pooled requests ---------------------------------------------------------------------------------------------

    def expect_at(self, request: RoutedRequest, island: Island) -> DecodeView | None:
        """Returns the decode instance that is told to expect the request while its prompt is computed; None: none is
        told."""
        return None

    def admission_due_s(self, request: RoutedRequest, island: Island) -> float:
        """Returns when a pooled request should be admitted at the latest. Batches that the pool forms begin with
        requests that are due."""
        return request.since_s + routing.patience_s(island, self.config.starvation_s)

    def hand_over_to(
        self, request: RoutedRequest, views: Sequence[DecodeView], island: Island
    ) -> DecodeView | None:
        """Returns which of these decode instances takes a real-time request directly from where its prompt was just
        computed; None: it goes through the pool. Does not overtake requests that wait there."""
        return None if len(island.decode_queue) else routing.emptiest(request, views)

    def decide(self, island: Island) -> Iterable[FormBatch | FindNear | Assign]:
        """Yields searches for the pool and offers. The caller executes each before it asks for the next."""
        return routing.assign_in_order(island.decode_queue, island.cluster.decodes)


class PrefillPart:
    """Decides which prompts a prefill instance starts, and how much of each it computes."""

    def __init__(self, limits: InstanceLimits, config: SchedulingConfig) -> None:
        self.limits = limits
        self.config = config

    def in_order(self, requests: Sequence[AnyPrefill], now: float) -> Sequence[AnyPrefill]:
        """Puts the most urgent first."""
        return requests

    def in_turn(self, requests: Sequence[PrefillRequest], at: PrefillBoundary) -> Sequence[PrefillRequest]:
        """Puts the most urgent first, by turns of their owners."""
        return at.in_turn(self.in_order(requests, at.now))

    def in_staging_order(self, candidates: Sequence[AnyPrefill]) -> Sequence[AnyPrefill]:
        """Puts the most urgent candidates of decode instances first."""
        return candidates

    def is_ahead(self, begun: PrefillRequest, request: PrefillRequest, now: float) -> bool:
        """Returns, for two prompts with the same prefix, whether the one that has begun will compute the common part
        before the other one could."""
        return True

    def plan(self, at: PrefillBoundary) -> None:
        if at.short_of_blocks is None:
            prefilling.admit_while(at, self.in_turn(at.waiting, at), prefilling.fits)
        prefilling.chunk_in_order(at, self.in_turn(at.computing, at))


class DecodePart:
    """Decides which requests a decode instance admits and evicts, and which are in its next iteration."""

    def __init__(self, limits: InstanceLimits, config: SchedulingConfig) -> None:
        self.limits = limits
        self.config = config

    def in_order(self, requests: Sequence[AnyDecode], now: float) -> Sequence[AnyDecode]:
        """Puts the most urgent prompts of a colocated instance first."""
        return requests

    def is_ahead(self, begun: DecodeRequest, request: DecodeRequest, now: float) -> bool:
        """See `PrefillPart`, for two prompts with the same prefix."""
        return True

    def expect(self, num_prefilling: int, num_ready: int, now: float) -> None:
        """Announces real time that will be offered soon: `num_prefilling` of its prompts are being computed, and
        `num_ready` are finished."""

    def plan(self, at: DecodeBoundary) -> None:
        self.preempt(at, decoding.victims(at, self.config.evict_ahead, self.in_eviction_order))
        decoding.run_all(at)
        decoding.admit_in_order(at, self.config)

    def preempt(
        self, at: DecodeBoundary, to_grow: Sequence[AnyDecode], for_others: Sequence[AnyDecode] = ()
    ) -> Sequence[AnyDecode]:
        """Lets requests leave as `preemption_mode` says: some so that the rest can grow, and some so that others can
        begin. Returns the dropped ones, which must not be planned. Prompts for embeddings are always dropped, because
        none of their KV goes to the pool."""
        mode = self.config.preemption_mode
        leaving = [*to_grow] if mode == "defer" else [*to_grow, *for_others]
        gone = leaving if mode == "recompute" else [each for each in leaving if each.is_embedding]
        if gone:
            at.drop(gone)
        if mode != "recompute":
            at.evict([each for each in leaving if not each.is_embedding])
        return gone

    def in_eviction_order(
        self, requests: Sequence[DecodeRequest], at: DecodeBoundary
    ) -> Sequence[DecodeRequest]:
        return decoding.longest_of_older_batch(requests, at)

    def took(self, seconds: float) -> None:
        """Reports how many seconds the iteration of the last plan took."""


class ColocatedPart(DecodePart):
    """The part of an instance that computes prompts and decodes. Candidates are prompts, or return from the pool."""

    def plan(self, at: DecodeBoundary) -> None:
        """Continues the running requests, in order of arrival. Others begin with the tokens that are left."""
        self.preempt(at, decoding.victims(at, self.config.evict_ahead, self.in_eviction_order))
        decoding.go_on(at, at.running)
        decoding.begin_in_order(at, self.config, [*at.requests, *at.batch])

    def in_eviction_order(
        self, requests: Sequence[DecodeRequest], at: DecodeBoundary
    ) -> Sequence[DecodeRequest]:
        return decoding.youngest(requests, at)


class Policy:
    name: ClassVar[str]
    # One line for users.
    summary: ClassVar[str]
    # The layouts of requests on colocated instances, beside the plain one, that users may turn on.
    layouts: ClassVar[Sequence[Layout]] = ()

    def __init__(self, config: SchedulingConfig) -> None:
        self.config = config

    def router(self) -> RouterPart:
        return RouterPart(self.config)

    def prefill(self, limits: InstanceLimits, estimate: Estimate | None) -> PrefillPart:
        """Returns the part of a prefill instance. `estimate` predicts how long iterations take; None: there are no
        predictions."""
        return PrefillPart(limits, self.config)

    def decode(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return DecodePart(limits, self.config)

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return ColocatedPart(limits, self.config)
