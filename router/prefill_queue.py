"""Requests that wait for prefill, the most urgent first: in one line or several, as the policy has it."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from alignedserve.router.request_state import Phase, RequestState
from alignedserve.router.token_counts import TokenCounts
from alignedserve.scheduling.island import RoutedRequest, Urgency
from alignedserve.scheduling.policies.base import RouterPart
from alignedserve.timing.deadlines import DEMOTION_S
from alignedserve.types import RequestKey


class Place(NamedTuple):
    is_new: bool
    start_s: float
    number: int
    state: RequestState


class Line:
    def __init__(self) -> None:
        # a request that has left meanwhile, or came again, is skipped. Those without an objective, those that can
        # still make theirs, and those that can't: their places have moved back by DEMOTION_S
        self._steady: list[Place] = []
        self._alive: list[Place] = []
        self._lost: list[Place] = []
        self._numbers: dict[RequestKey, int] = {}
        self._num_pushed = 0
        self.num_demotions = 0
        # nothing starts until something was released
        self.is_refused = False

    def __len__(self) -> int:
        return len(self._numbers)

    def push(self, state: RequestState, urgency: Urgency) -> None:
        self._num_pushed += 1
        self._numbers[state.key] = self._num_pushed
        heap = self._alive if urgency.can_be_lost else self._steady
        heapq.heappush(heap, Place(urgency.is_new, urgency.start_s, self._num_pushed, state))

    def discard(self, key: RequestKey) -> None:
        """Safe to repeat."""
        self._numbers.pop(key, None)

    def first(self, now: float) -> RequestState | None:
        """It stays there until it is discarded."""
        for heap in (self._steady, self._alive, self._lost):
            self._skip_gone(heap)
        while self._alive and self._alive[0].start_s < now:
            self._demote(heapq.heappop(self._alive))
            self._skip_gone(self._alive)
        tops = [heap[0] for heap in (self._steady, self._alive, self._lost) if heap]
        return min(tops).state if tops else None

    def _demote(self, place: Place) -> None:
        self.num_demotions += 1
        heapq.heappush(self._lost, place._replace(start_s=place.start_s + DEMOTION_S))

    def _skip_gone(self, heap: list[Place]) -> None:
        while heap and self._numbers.get(heap[0].state.key) != heap[0].number:
            heapq.heappop(heap)


class PrefillQueue:
    def __init__(self, policy: RouterPart) -> None:
        self._policy = policy
        self._lines = [Line() for _ in range(policy.num_lines)]
        # tokens to compute
        self._missing = TokenCounts()

    def __len__(self) -> int:
        return len(self._missing)

    @property
    def num_tokens(self) -> int:
        """To compute of all of them."""
        return self._missing.total

    def before(self, is_rt: bool) -> tuple[int, int]:
        """How many requests a new one of this class would have before it, with how many tokens to compute."""
        own = self._policy.line(is_rt)
        others = [each for each in (True, False) if self._policy.line(each) <= own]
        return sum(map(self._missing.count, others)), sum(map(self._missing.sum, others))

    @property
    def num_demotions(self) -> int:
        return sum(line.num_demotions for line in self._lines)

    def push(self, state: RequestState, urgency: Urgency) -> None:
        self.discard(state)
        self._missing.put(state.key, state.num_missing, state.is_rt)
        self._line_of(state).push(state, urgency)

    def discard(self, state: RequestState) -> None:
        """Safe to repeat."""
        self._line_of(state).discard(state.key)
        self._missing.discard(state.key)

    def refused(self, state: RequestState) -> None:
        """The pool has no room for it."""
        self._line_of(state).is_refused = True

    def has_room_again(self) -> None:
        for line in self._lines:
            line.is_refused = False

    # ---- for the policy: see `scheduling.island.Queue` ---------------------------------------------------------------

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
