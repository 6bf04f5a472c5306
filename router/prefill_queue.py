"""Requests before their prefill, the most urgent first: in one line or several, as the policy has it.

A request waits in a line until the policy starts it, and then for blocks of the pool (`reserving`).
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from alignedserve.router.request_state import Phase, RequestState
from alignedserve.router.token_counts import TokenCounts
from alignedserve.scheduling.island import RoutedRequest, Urgency
from alignedserve.scheduling.policies.base import RouterPart
from alignedserve.timing.deadlines import DEMOTION_S
from alignedserve.types import RequestKey


class Position(NamedTuple):
    is_new: bool
    start_s: float
    number: int
    state: RequestState


class Line:
    def __init__(self) -> None:
        # Positions of requests without an objective, of those that can still make theirs, and of those that can't: the
        # last have moved back by DEMOTION_S. A position is skipped if its request has left, or has come again.
        self._steady: list[Position] = []
        self._alive: list[Position] = []
        self._lost: list[Position] = []
        # The number of the position that counts, for each request that waits.
        self._numbers: dict[RequestKey, int] = {}
        self._num_pushed = 0
        self.num_demotions = 0
        # Whether the pool had no room for a request of this line: nothing starts until blocks were released.
        self.is_refused = False

    def __len__(self) -> int:
        return len(self._numbers)

    def push(self, state: RequestState, urgency: Urgency) -> None:
        self._num_pushed += 1
        self._numbers[state.key] = self._num_pushed
        heap = self._alive if urgency.can_be_lost else self._steady
        heapq.heappush(heap, Position(urgency.is_new, urgency.start_s, self._num_pushed, state))

    def discard(self, key: RequestKey) -> None:
        """It is safe to repeat this."""
        self._numbers.pop(key, None)

    def first(self, now: float) -> RequestState | None:
        """Returns the most urgent request, which stays in the line."""
        for heap in (self._steady, self._alive, self._lost):
            self._skip_left(heap)
        while self._alive and self._alive[0].start_s < now:
            self._demote(heapq.heappop(self._alive))
            self._skip_left(self._alive)
        tops = [heap[0] for heap in (self._steady, self._alive, self._lost) if heap]
        return min(tops).state if tops else None

    def _demote(self, position: Position) -> None:
        self.num_demotions += 1
        heapq.heappush(self._lost, position._replace(start_s=position.start_s + DEMOTION_S))

    def _skip_left(self, heap: list[Position]) -> None:
        while heap and self._numbers.get(heap[0].state.key) != heap[0].number:
            heapq.heappop(heap)


class PrefillQueue:
    def __init__(self, policy: RouterPart) -> None:
        self._policy = policy
        self._lines = [Line() for _ in range(policy.num_lines)]
        # Tokens to compute of each request that waits in a line.
        self._missing = TokenCounts()
        # Tokens to compute of each request that was started, and whose blocks the pool was asked for.
        self.reserving = TokenCounts()
        # Best-effort requests in the lines whose KV in the pool is not for others to take.
        self.pinned: dict[RequestKey, RequestState] = {}

    def __len__(self) -> int:
        """The number of requests in the lines."""
        return len(self._missing)

    @property
    def num_tokens(self) -> int:
        """The number of tokens to compute of all requests in the lines."""
        return self._missing.total

    def num_tokens_of(self, is_rt: bool) -> int:
        """Returns the number of tokens to compute of requests of the class in the lines, and of those that were started
        and wait for blocks."""
        return self._missing.sum(is_rt) + self.reserving.sum(is_rt)

    def waiting_before(self, is_rt: bool) -> tuple[int, int]:
        """Returns how many requests, with how many tokens to compute, a new one of this class would have before it.
        However much waits behind a request, it is no reason to refuse it."""
        own = self._policy.line(is_rt)
        classes = [each for each in (True, False) if self._policy.line(each) <= own]
        both = (self._missing, self.reserving)
        return (
            sum(counts.count(each) for counts in both for each in classes),
            sum(counts.sum(each) for counts in both for each in classes),
        )

    @property
    def num_demotions(self) -> int:
        return sum(line.num_demotions for line in self._lines)

    def push(self, state: RequestState, urgency: Urgency) -> None:
        self.discard(state)
        self._missing.put(state.key, state.num_missing, state.is_rt)
        self._line_of(state).push(state, urgency)

    def discard(self, state: RequestState) -> None:
        """It is safe to repeat this."""
        self._line_of(state).discard(state.key)
        self._missing.discard(state.key)
        self.reserving.discard(state.key)
        self.pinned.pop(state.key, None)

    def take_pinned(self) -> list[RequestState]:
        """Returns the pinned requests, which stay in their lines, and are pinned no more."""
        pinned, self.pinned = list(self.pinned.values()), {}
        return pinned

    def refused(self, state: RequestState) -> None:
        """The pool has no room for the request: its line waits."""
        self._line_of(state).is_refused = True

    def clear_refusals(self) -> None:
        for line in self._lines:
            line.is_refused = False

    # ---- for the policy: see `scheduling.island.PrefillQueue` --------------------------------------------------------

    def is_empty(self, line: int) -> bool:
        return not len(self._lines[line])

    def is_refused(self, line: int) -> bool:
        return self._lines[line].is_refused

    def first(self, line: int, now: float) -> RequestState | None:
        state = self._lines[line].first(now)
        if state is not None and state.phase is not Phase.QUEUED:
            raise RuntimeError(f"request {state.key} waits for prefill, but is {state.phase.value}")
        return state

    def take(self, request: RoutedRequest) -> None:
        self._lines[self._policy.line(request.is_rt)].discard(request.key)
        self._missing.discard(request.key)

    def _line_of(self, state: RequestState) -> Line:
        return self._lines[self._policy.line(state.is_rt)]
