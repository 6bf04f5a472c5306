"""What a policy is: a name, and up to four parts. What a part leaves out, it does in order of arrival.

A part is used in one process only: the router has its own, and so does each instance. It may remember what it has
seen, as long as its process lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

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
    """Which prompts start where, and which pooled requests go to which decode instance."""

    # The number of lines of requests that wait for prefill.
    num_lines = 1

    def __init__(self, config: SchedulingConfig) -> None:
        self.config = config

    # ---- prompts -----------------------------------------------------------------------------------------------------

    def line(self, is_rt: bool) -> int:
        """The line in which such a request waits for prefill. Only requests in that line and in earlier ones can cause
        its refusal."""
        return 0

    def urgency(self, request: RoutedRequest, island: Island) -> Urgency:
        """Its place in its line."""
        return Urgency(True, request.arrived_s, False)

    def start(self, island: Island) -> Iterator[RoutedRequest]:
        """Starts prompts, and takes them from the queue. The caller need not ask for all of them."""
        if not routing.has_evicted(island):
            yield from routing.start_line(island, 0, routing.room_left(island, self.config.prefill_window))

    def place(
        self,
        request: RoutedRequest,
        views: Sequence[PrefillView],
        num_known: Callable[[PrefillView], int],
        island: Island,
    ) -> PrefillView:
        """The instance that computes its prompt. `num_known` is the number of prompt tokens whose KV an instance may
        have."""
        return min(views, key=lambda view: (view.pending.total - num_known(view), -view.num_free_blocks))

    def pins(self, request: RoutedRequest) -> bool:
        """Whether what the pool has of a prompt that was begun and waits again is not for others to take."""
        return False

    # ---- pooled requests ---------------------------------------------------------------------------------------------

    def expect_at(self, request: RoutedRequest, island: Island) -> DecodeView | None:
        """The decode instance to which the request is announced while its prompt is computed; None if there is
        none."""
        return None

    def admission_due_s(self, request: RoutedRequest, island: Island) -> float:
        """By when a pooled request should be admitted somewhere: batches that the pool forms begin with requests that
        are due."""
        return request.since_s + routing.patience_s(island, self.config.starvation_s)

    def hand_over_to(
        self, request: RoutedRequest, views: Sequence[DecodeView], island: Island
    ) -> DecodeView | None:
        """Which of these decode instances takes a real-time request at once, straight from where its prompt was just
        computed; None: it goes by way of the pool. It overtakes none that waits there."""
        return None if len(island.decode_queue) else routing.emptiest(request, views)

    def decide(self, island: Island) -> Iterable[FormBatch | FindNear | Assign]:
        """What to ask of the pool, and what to offer. Each is carried out before the next one is asked for."""
        return routing.assign_in_order(island.decode_queue, island.cluster)


class PrefillPart:
    """Which prompts a prefill instance starts, and how much of each it computes."""

    def __init__(self, limits: InstanceLimits, config: SchedulingConfig) -> None:
        self.limits = limits
        self.config = config

    def in_order(self, requests: Sequence[AnyPrefill], now: float) -> Sequence[AnyPrefill]:
        """Puts the most urgent first."""
        return requests

    def in_staging_order(self, candidates: Sequence[AnyPrefill]) -> Sequence[AnyPrefill]:
        """Puts the most urgent candidates of decode instances first."""
        return candidates

    def is_ahead(self, begun: PrefillRequest, request: PrefillRequest, now: float) -> bool:
        """Of two prompts with the same prefix, whether the one under way will have computed what both need before the
        other could."""
        return True

    def plan(self, at: PrefillBoundary) -> None:
        if at.short_of_blocks is None:
            prefilling.admit_while(at, self.in_order(at.waiting, at.now), prefilling.fits)
        prefilling.chunk_in_order(at, self.in_order(at.computing, at.now))


class DecodePart:
    """Which requests a decode instance admits and evicts, and which are in its next iteration."""

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
        """Real time will be offered in a moment: so many of its prompts are being computed, and so many are
        computed."""

    def plan(self, at: DecodeBoundary) -> None:
        self.preempt(at, decoding.victims(at, self.config.evict_ahead, self.in_eviction_order))
        decoding.run_all(at)
        decoding.admit_in_order(at, self.config)

    def preempt(
        self, at: DecodeBoundary, to_grow: Sequence[AnyDecode], for_others: Sequence[AnyDecode] = ()
    ) -> Sequence[AnyDecode]:
        """Has requests leave as `preemption_mode` says: some so that the rest can grow, and some so that others can
        begin. Returns those that are gone, which are not to be planned. Prompts for embeddings are dropped in any case:
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
    """What an instance does that computes prompts and decodes: candidates are prompts, or return from the pool."""

    def plan(self, at: DecodeBoundary) -> None:
        """Running requests go on, in order of arrival; with the tokens that are left, others begin."""
        self.preempt(at, decoding.victims(at, self.config.evict_ahead, self.in_eviction_order))
        decoding.go_on(at, at.running)
        decoding.begin_in_order(at, self.config, [*at.requests, *at.batch])

    def in_eviction_order(
        self, requests: Sequence[DecodeRequest], at: DecodeBoundary
    ) -> Sequence[DecodeRequest]:
        return decoding.youngest(requests, at)


class Policy:
    name: ClassVar[str]
    # The summary is one line for users.
    summary: ClassVar[str]
    # Whether colocated instances may be configured to share blocks from both ends (`share_blocks`).
    can_share_blocks: ClassVar[bool] = False
    # Whether a colocated instance of this policy may keep inputs of layers in place of KV (`DecodeBoundary.admit`).
    keeps_inputs: ClassVar[bool] = False

    def __init__(self, config: SchedulingConfig) -> None:
        self.config = config

    def router(self) -> RouterPart:
        return RouterPart(self.config)

    def prefill(self, limits: InstanceLimits, estimate: Estimate | None) -> PrefillPart:
        """`estimate` predicts how long iterations take; None if nothing does."""
        return PrefillPart(limits, self.config)

    def decode(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return DecodePart(limits, self.config)

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return ColocatedPart(limits, self.config)
