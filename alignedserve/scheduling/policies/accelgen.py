"""AccelGen: requests with slack let others go first, and each iteration has as much work as its tightest objective
allows.

The paper's rules and terms, with its sections:

- Requests with less *remaining time* go first (4.3; `scheduling/remaining_time.py`).
- The *token budget* of an iteration follows from the tightest objective in its batch (4.2). It may exceed the *pivot*,
  beyond which more tokens hardly increase throughput. Chunks that are still to come are counted in pivots.
- Prompts are cut where the budget ends. Only one long prompt is computed at a time (4.2).
- Urgent requests are always in the batch. They push out the requests with the most remaining time (4.4, algorithm 1).
- Admission leaves free blocks as vLLM does, on which the paper's system is built (5, `decoding.num_free`).
- Among waiting prompts with about the least remaining time, the one begins that best uses up the tokens and blocks that
  are left (4.4, algorithm 2).

Departures from the paper, with reasons:

- The paper scales the budget with the objective, from one measured batch of the pivot's size. Here the cost model gives
  it, because it includes the cost of decodes and long prefixes.
- A request that is pushed out for lack of time skips the iteration and keeps its KV. Only one that is pushed out for
  lack of blocks leaves with its KV. The paper has one kind of preemption, vLLM's.
- A prompt takes the blocks of all its tokens when it begins, as everywhere here. In the paper each chunk takes its own
  (4.4). In simulation that gave 0.95 times as many tokens (`benchmarks/results/scheduling.md`).
- An objective that can't be met any more bounds no iteration. A prompt that has missed its objective is ordered as if
  it were due ten seconds later, so prompts that can still meet theirs go first. Otherwise one late prompt would make
  the next ones late.
- An urgent request never makes another urgent one leave, nor one that was urgent at admission and has no token since.
  They would take turns.
- A request without a window or an objective has no remaining time, and goes last. In the paper all have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import AnyPrefill, DecodeBoundary, DecodeRequest
from alignedserve.scheduling.chunk_budget import tokens_within
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.island import Assign, DecodeView, Island, RoutedRequest, Urgency
from alignedserve.scheduling.policy import DecodePart, Policy, PrefillPart, RouterPart
from alignedserve.scheduling.remaining_time import Pivot, RemainingTime
from alignedserve.scheduling.routing import assign_in_order, emptiest, real_time_first
from alignedserve.timing.deadlines import due_s
from alignedserve.timing.estimate import Estimate

# Remaining times that differ by less count as equal: the paper's gamma.
ALIKE_S = 0.75
# Requests without an objective go behind those with one, because no job's window is longer than these seconds.
LONGEST_WINDOW_S = 7 * 86400.0


class AccelgenDecode(DecodePart):
    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate | None) -> None:
        super().__init__(limits, config)
        self._estimate = estimate
        self._time = RemainingTime(limits, estimate)

    def took(self, seconds: float) -> None:
        self._time.took(seconds)

    def plan(self, at: DecodeBoundary) -> None:
        waiting = self._look(at)
        self.preempt(at, *self._victims(at, waiting))
        self._run(at)
        for request in at.ready_and_pending()[1]:
            decoding.compute(at, request, at.num_tokens_left)
        for request in waiting:
            if not decoding.has_room(at, request, self.config):
                break
            self._admit(at, request)

    def in_eviction_order(
        self, requests: Sequence[DecodeRequest], at: DecodeBoundary
    ) -> Sequence[DecodeRequest]:
        """Returns the requests with the most remaining time first. Those that were already to be evicted at the last
        boundary stay in front."""
        in_order = self._time.in_order(requests, at.now)
        in_order.reverse()
        return sorted(in_order, key=lambda request: not at.was_evicted(request))

    def _admit(self, at: DecodeBoundary, request: DecodeRequest) -> None:
        self._time.admitted(request, at.now)
        at.admit(request)

    def _look(self, at: DecodeBoundary) -> list[DecodeRequest]:
        """Returns the waiting requests, in order."""
        waiting = [*at.requests, *at.batch]
        self._time.look(at.running, at.now)
        self._time.look(waiting, at.now)
        return self._time.in_order(waiting, at.now)

    def _victims(
        self, at: DecodeBoundary, waiting: Sequence[DecodeRequest]
    ) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Returns the requests that leave so that others can grow, and those that leave for urgent requests without
        room."""
        for_urgent: list[DecodeRequest] = []
        chosen = decoding.victims(at, self.config.evict_ahead, self.in_eviction_order)
        room = decoding.RoomToCome(at, self.config, chosen)
        others: list[DecodeRequest] | None = None
        for request in waiting:
            if not self._time.is_urgent(request, at.now):
                break
            if others is None and not room.fits(request):
                others = self._may_leave(at, chosen)
            leaving = room.make(request, others or ())
            if leaving is None:
                break
            for_urgent += leaving
            others = others and others[len(leaving) :]
        return chosen, for_urgent

    def _may_leave(self, at: DecodeBoundary, leaving: Sequence[DecodeRequest]) -> list[DecodeRequest]:
        """Returns the requests that may leave for urgent ones, in that order."""
        return [
            each
            for each in self.in_eviction_order(at.running, at)
            if each not in leaving
            and not (self._time.came_urgent(each) or self._time.is_urgent(each, at.now))
        ]

    def _run(self, at: DecodeBoundary, num_urgent_tokens: int = 0) -> tuple[list[int], float]:
        """Returns the lengths of the requests that decode, and how long the iteration may take."""
        decodes, bound_s = self._time.in_time(at.ready_and_pending()[0], at.now, num_urgent_tokens)
        return [request.num_read for request in at.run_many(decodes)], bound_s


class AccelgenColocated(AccelgenDecode):
    def plan(self, at: DecodeBoundary) -> None:
        waiting = self._look(at)
        self.preempt(at, *self._victims(at, waiting))
        waiting = [each for each in waiting if not decoding.should_wait(at, each)]
        begun = self._time.in_order(at.ready_and_pending()[1], at.now)
        # A prompt without room would make decodes skip the iteration for nothing.
        could_run = [
            *begun,
            *(each for each in waiting if decoding.has_room(at, each, self.config)),
        ]
        urgent = [each for each in could_run if self._time.is_urgent(each, at.now)]
        pivot = self._time.pivot.num_tokens
        lengths, bound_s = self._run(at, min(sum(each.num_pending for each in urgent), pivot))
        if not (begun or waiting):
            return
        # A prompt makes progress if nothing else runs, or if one is urgent.
        num_least = at.limits.block_size if urgent or not lengths else 0
        num_before = begun[0].num_tokens - begun[0].num_pending if begun else 0
        within = tokens_within(at, self._estimate, lengths, bound_s, num_least, num_before)
        prompts = ChunkedPrompts(at, within)
        for request in begun:
            prompts.compute(request)
        self._begin(at, waiting, prompts)

    def _begin(self, at: DecodeBoundary, waiting: list[DecodeRequest], prompts: ChunkedPrompts) -> None:
        """Begins urgent requests in order, and then those that fit best (algorithm 2)."""
        while waiting := [each for each in waiting if each.is_returning or prompts.num_left > 0]:
            first, now = waiting[0], at.now
            if self._time.is_urgent(first, now):
                fitting = [first] if decoding.has_room(at, first, self.config) else []
            else:
                until_s = self._time.of(first, now) + ALIKE_S
                alike = [each for each in waiting if self._time.of(each, now) <= until_s]
                fitting = [
                    each
                    for each in alike
                    if prompts.may_begin(each) and decoding.has_room(at, each, self.config)
                ]
            if not fitting:
                return
            chosen = min(fitting, key=prompts.distance)
            waiting.remove(chosen)
            if decoding.should_wait(at, chosen):
                continue
            self._admit(at, chosen)
            if not chosen.num_pooled:
                prompts.compute(chosen)


class ChunkedPrompts:
    """The prompts that an iteration computes."""

    def __init__(self, at: DecodeBoundary, num_tokens: int) -> None:
        self._at = at
        self.num_left = num_tokens
        self._is_long_begun = False

    def compute(self, request: DecodeRequest) -> None:
        count = decoding.compute(self._at, request, self.num_left)
        self.num_left -= count
        self._is_long_begun |= count < request.num_pending

    def may_begin(self, request: DecodeRequest) -> bool:
        """Returns whether the request may begin. It may not if it is a second long prompt beside one that has begun."""
        num_at_once = min(self.num_left, self._at.limits.max_prefill_chunk or self.num_left)
        return request.is_returning or not self._is_long_begun or request.num_pending <= num_at_once

    def distance(self, request: DecodeRequest) -> float:
        """Returns how far the request is from using up both tokens and blocks."""
        num_tokens = 1 if request.num_pooled else min(request.num_pending, self.num_left)
        span = self._at.limits.span
        num_free = self._at.num_free_blocks - self._at.growth_of(request, 0)
        return math.hypot(self.num_left - num_tokens, num_free / span.num_groups * span.block_size)


class AccelgenPrefill(PrefillPart):
    """Orders prompts by remaining time on instances that only compute prompts, one at a time."""

    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate | None) -> None:
        super().__init__(limits, config)
        self._pivot = Pivot(limits, estimate)

    def in_order(self, requests: Sequence[AnyPrefill], now: float) -> Sequence[AnyPrefill]:
        def place(request: AnyPrefill) -> tuple[bool, bool, float]:
            due = due_s(request.deadlines, request.num_output)
            remaining_s = due - -(-request.num_pending // self._pivot.num_tokens) * self._pivot.seconds - now
            is_urgent = remaining_s <= self._pivot.seconds
            return not is_urgent, not is_urgent and not request.num_computed, remaining_s

        return sorted(requests, key=place)


class AccelgenRouter(RouterPart):
    def urgency(self, request: RoutedRequest, island: Island) -> Urgency:
        due = due_s(request.deadlines, request.num_output)
        if math.isinf(due):
            return Urgency(True, request.arrived_s + LONGEST_WINDOW_S, False)
        is_begun = request.num_output > 0
        needed_s = island.cluster.prefill_s(request.num_reusable, request.num_tokens)
        if not request.is_rt:
            num_left = max(island.expected_output(request) - request.num_output, 0)
            needed_s += num_left * island.cluster.decode_s(request.num_tokens)
        return Urgency(True, due - needed_s, not is_begun)

    def hand_over_to(
        self, request: RoutedRequest, views: Sequence[DecodeView], island: Island
    ) -> DecodeView | None:
        """Overtakes best effort."""
        return None if island.decode_queue.real_time else emptiest(request, views)

    def decide(self, island: Island) -> Iterable[Assign]:
        return assign_in_order(real_time_first(island.decode_queue), island.cluster.decodes)


class Accelgen(Policy):
    name = "accelgen"
    summary = "least remaining time first, in iterations as long as the tightest objective allows"

    def router(self) -> RouterPart:
        return AccelgenRouter(self.config)

    def prefill(self, limits: InstanceLimits, estimate: Estimate | None) -> PrefillPart:
        return AccelgenPrefill(limits, self.config, estimate)

    def decode(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return AccelgenDecode(limits, self.config, estimate)

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return AccelgenColocated(limits, self.config, estimate)
