"""ALISE: the shortest predicted remaining time first, with preemption, and with KV swapped by estimated waiting time.

The paper's rules, with its sections:

- The remaining time of a request is predicted (3.1): its prompt, plus a time for each expected token of its answer that
  is linear in the prompt's length. The base of past prompts is loaded from a file before serving (`--length-corpus`),
  as in the paper, or grows from nothing.
- There are several priority queues by that time (3.1), each for twice the time of the one before. *Virtual aging*: a
  request that has not run for a while rises by a queue, and again after the same time.
- A request with an answer that exceeds its predicted length falls by a queue, and the prediction doubles.
- The requests with the highest priority are in memory, as many as fit (3.2, algorithm 2). Within a queue, the shortest
  go first. To make room for another request, the one with the longest *estimated waiting time* leaves with its KV. That
  is the time of all requests before it, or the time until it rises, whichever is less. Copies run beside iterations.
- Admission leaves free blocks as vLLM does, on which the paper's system is built (3.3, `decoding.num_free`).

Departures from the paper, with reasons:

- All requests in memory run, so none waits there to be offloaded or uploaded ahead of time. One thing is done ahead:
  while a shorter request waits, the longest leave until some blocks are free beyond those that it needs. So the next
  one need not wait for a copy.
- In the paper, remaining time only separates queues and does not decide which request of a queue leaves. Here a request
  in memory also leaves for one of its own queue, if that one takes less time even with the copies for leaving and
  returning, or with computing again.
- A request that was admitted because of aging keeps the queue to which it had risen. It keeps it from its first token
  on for as long as the longest requests of that queue take, and no request of that queue makes it leave. Otherwise it
  would get one token per rise, for two copies of its KV.
- Within a queue, a rise also halves the remaining time that counts. So a request that has risen to the first queue does
  not wait there behind all new shorter ones.
- If KV is dropped instead (`--preemption-mode recompute`), no request leaves for one that has only risen. They would
  take turns, and each would be computed again before it gets a token. These are the deadlocks that the paper names. In
  other modes, a request without a token since its admission never leaves for one that has only risen, because a pool
  without room drops KV, too. Nor does it leave for others of its own queue.
- No request leaves for one that would find no room even if all leave that may. Later requests then wait behind that
  one.
- KV in the pool is not compressed, which does not affect scheduling.
- The paper gives neither the number of queues nor the time until a rise: see the constants.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding, routing
from alignedserve.scheduling.boundary import DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.island import Island, RoutedRequest, Urgency
from alignedserve.scheduling.policy import DecodePart, Policy, RouterPart
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestKey

# The longest remaining time in the first queue, in seconds. It doubles from queue to queue; the last queue has no
# limit.
FIRST_QUEUE_S = 0.5
NUM_QUEUES = 8
# Seconds without running after which a request rises by a queue.
AGE_S = 5.0
# Prompts that may wait at a colocated instance per request that it can run. The router sends the shortest.
NUM_CHOICES = 1
# The share of the blocks that the requests with the lowest priority leave free for the next one, while others wait. In
# simulation this gains 1 to 5 % of the normalized latency. Twice as much gains 1 % more, and moves KV four times as
# often.
KEPT_FREE = 0.05
_QUEUE_ENDS_S = [FIRST_QUEUE_S * 2**number for number in range(NUM_QUEUES - 1)]


@dataclass(eq=False, slots=True)
class AliseMark:
    """The policy's data of a request."""

    # Seconds per token of its answer.
    token_s: float
    # The expected length of its answer, and how often the answer was longer than expected.
    length: int
    num_exceeded: int
    # The output tokens that it had when it came.
    num_brought: int
    # When it last ran, or came, and the number of its last iteration.
    ran_s: float
    last_run: int
    # The number of queues by which it had risen when it was admitted, and until when it keeps them.
    num_kept: int = 0
    kept_until_s: float = 0.0


class RemainingTimePredictor:
    """Predicts the remaining time of requests."""

    def __init__(self, estimate: Estimate | None) -> None:
        self._estimate = estimate

    def token_s(self, num_tokens: int) -> float:
        """Returns the seconds per token after a prompt of `num_tokens` tokens."""
        return self._estimate.iteration([], [num_tokens]) if self._estimate else 0.0

    def remaining_s(self, request: DecodeRequest) -> float:
        prompt_s = 0.0
        if self._estimate and request.num_pending > 1 and not request.is_returning:
            prompt_s = self._estimate.iteration([(request.num_cached, request.num_pending)], [])
        return prompt_s + request.num_left * float(request.mark.token_s)

    def return_s(self, request: DecodeRequest, is_recomputed: bool) -> float:
        return decoding.return_s(request, self._estimate, is_recomputed) if self._estimate else 0.0


class AliseDecode(DecodePart):
    """On a colocated instance, candidates are prompts as well."""

    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate | None) -> None:
        super().__init__(limits, config)
        self._predictor = RemainingTimePredictor(estimate)
        # A request that would be computed again does not leave before its blocks are needed.
        keeps_free = config.preemption_mode == "swap"
        self._num_kept_free = int(KEPT_FREE * limits.num_blocks) if keeps_free else 0
        # When the last iteration was planned.
        self._planned_s = 0.0

    def plan(self, at: DecodeBoundary) -> None:
        waiting = [each for each in (*at.requests, *at.batch) if not decoding.should_wait(at, each)]
        in_order = self._in_order([*at.running, *waiting], at.now)
        gone = self.preempt(at, *self._victims(at, in_order))
        in_order = [each for each in in_order if each not in gone]
        ready = [each for each in in_order if each.num_columns and each.num_pending == 1]
        at.run_many(ready)
        is_room = True
        for request in in_order:
            if request.num_columns:
                if request.num_pending > 1:
                    decoding.compute(at, request, at.num_tokens_left)
            elif is_room and at.num_tokens_left > 0 and not decoding.should_wait(at, request):
                # Freed blocks are for the first request that finds no room.
                is_room = decoding.has_room(at, request, self.config)
                if is_room:
                    at.admit(request)
                    if not request.num_pooled:
                        decoding.compute(at, request, at.num_tokens_left)
        self._planned_s = at.now

    def queue_of(self, request: DecodeRequest, now: float) -> int:
        """Returns the number of its queue; 0 has the highest priority."""
        return _risen(request.mark, self.own_queue_of(request), now)

    def own_queue_of(self, request: DecodeRequest) -> int:
        """Returns the number of its queue without any rise."""
        return _own_queue(request.mark, self._predictor.remaining_s(request))

    def waiting_times(self, in_order: Iterable[DecodeRequest], now: float) -> list[float]:
        """Returns the estimated seconds until each runs: the time of those before it, or the time until it rises."""
        found, before_s = [], 0.0
        for request in in_order:
            rises_s = AGE_S - (now - request.mark.ran_s) % AGE_S
            found.append(min(before_s, rises_s) if self.queue_of(request, now) else before_s)
            before_s += self._predictor.remaining_s(request)
        return found

    def in_eviction_order(
        self, requests: Sequence[DecodeRequest], at: DecodeBoundary
    ) -> Sequence[DecodeRequest]:
        """Returns the requests with the longest estimated waiting time first, and among equals the lowest priority
        first."""
        in_order = self._in_order(requests, at.now)
        waits_s = self.waiting_times(in_order, at.now)
        places = range(len(in_order))
        last_first = sorted(
            places, key=lambda place: (not at.was_evicted(in_order[place]), -waits_s[place], -place)
        )
        return [in_order[place] for place in last_first]

    def _in_order(self, requests: Iterable[DecodeRequest], now: float) -> list[DecodeRequest]:
        """Returns the requests with the highest priority first, and within a queue the shortest first. A rise halves
        the remaining time that counts, because each queue has twice the time of the one before."""
        found = []
        for number, request in enumerate(requests):
            self._look(request, now)
            remaining_s, mark = self._predictor.remaining_s(request), request.mark
            counted_s = math.ldexp(remaining_s, -_num_rises(mark, now))
            found.append(((_risen(mark, _own_queue(mark, remaining_s), now), counted_s, number), request))
        found.sort(key=lambda each: each[0])
        return [request for _, request in found]

    def _look(self, request: DecodeRequest, now: float) -> None:
        length, mark = request.num_output + request.num_left, request.mark
        if mark is None:
            prompt_len = request.num_tokens - request.num_output
            token_s = self._predictor.token_s(prompt_len)
            request.mark = AliseMark(token_s, length, 0, request.num_output, now, request.last_run)
            return
        if length > mark.length:
            mark.length, mark.num_exceeded = length, mark.num_exceeded + 1
        if request.last_run != mark.last_run:
            num_rises = int((self._planned_s - mark.ran_s) / AGE_S)
            if num_rises > 0:
                mark.num_kept, mark.kept_until_s = num_rises, math.inf
            mark.last_run, mark.ran_s = request.last_run, now
        if math.isinf(mark.kept_until_s) and request.num_output > mark.num_brought:
            queue = max(self.own_queue_of(request) - mark.num_kept, 0)
            mark.kept_until_s = now + FIRST_QUEUE_S * 2**queue

    def _victims(
        self, at: DecodeBoundary, in_order: Sequence[DecodeRequest]
    ) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Returns the requests that leave so that others can grow, and those that leave so that requests before them in
        the order can begin."""
        for_others: list[DecodeRequest] = []
        chosen = decoding.victims(at, self.config.evict_ahead, self.in_eviction_order)
        room = decoding.RoomToCome(at, self.config, chosen)
        places: dict[RequestKey, int] = {}
        last: list[DecodeRequest] | None = None
        for place, request in enumerate(in_order):
            if request.num_columns:
                continue
            may_leave: Iterable[DecodeRequest] = ()
            if not room.fits(request, self._num_kept_free):
                if last is None:
                    places = {each.key: number for number, each in enumerate(in_order)}
                    last = [each for each in self.in_eviction_order(at.running, at) if each not in chosen]
                may_leave = self._may_leave(
                    request, (each for each in last if places[each.key] > place), at.now
                )
            leaving = room.make(request, may_leave, num_kept_free=self._num_kept_free)
            if leaving is None:
                break
            if last and leaving:
                for_others += leaving
                last = [each for each in last if each not in leaving]
        return chosen, for_others

    def _may_leave(
        self, other: DecodeRequest, behind: Iterable[DecodeRequest], now: float
    ) -> Iterator[DecodeRequest]:
        """Yields the requests that leave for the other one. Each costs calls of the cost model."""
        return (each for each in behind if self._leaves_for(each, other, now))

    def _leaves_for(self, request: DecodeRequest, other: DecodeRequest, now: float) -> bool:
        """Returns whether this request, which is in memory, leaves for the other one, which waits."""
        is_recomputed = self.config.preemption_mode == "recompute"
        has_only_come = request.num_output == request.mark.num_brought
        queue, other_queue = self.queue_of(request, now), self.own_queue_of(other)
        if not (has_only_come or is_recomputed):
            other_queue = self.queue_of(other, now)
        if queue != other_queue:
            return queue > other_queue
        if has_only_come or _num_rises(request.mark, now):
            return False
        remaining_s, return_s = self._predictor.remaining_s, self._predictor.return_s(request, is_recomputed)
        return remaining_s(request) > remaining_s(other) + return_s


def _own_queue(mark: AliseMark, remaining_s: float) -> int:
    return min(bisect_left(_QUEUE_ENDS_S, remaining_s) + mark.num_exceeded, NUM_QUEUES - 1)


def _num_rises(mark: AliseMark, now: float) -> int:
    num_rises = int((now - mark.ran_s) / AGE_S)
    return max(num_rises, mark.num_kept) if now < mark.kept_until_s else num_rises


def _risen(mark: AliseMark, own_queue: int, now: float) -> int:
    """Returns the queue to which it has risen from its own."""
    return max(own_queue - _num_rises(mark, now), 0)


class AliseRouter(RouterPart):
    def urgency(self, request: RoutedRequest, island: Island) -> Urgency:
        """Orders by arrival plus predicted remaining time: the shortest first, unless it comes too much later."""
        needed_s = island.cluster.prefill_s(request.num_reusable, request.num_tokens)
        num_left = max(island.expected_output(request) - request.num_output, 0)
        needed_s += num_left * island.cluster.decode_s(request.num_tokens)
        return Urgency(True, request.arrived_s + needed_s, False)

    def start(self, island: Island) -> Iterator[RoutedRequest]:
        """Starts new requests without waiting for evicted ones, because instances decide which goes first. A request
        that left without its KV waits here as well, and must not hide shorter ones from the instances."""
        room = routing.room_to_choose(island, self.config.prefill_window, NUM_CHOICES)
        yield from routing.start_line(island, 0, room)


class Alise(Policy):
    name = "alise"
    summary = "the shortest predicted remaining time first, with preemption"

    def router(self) -> RouterPart:
        return AliseRouter(self.config)

    def decode(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return AliseDecode(limits, self.config, estimate)

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return AliseDecode(limits, self.config, estimate)
