"""Requests that wait in the pool for a decode instance."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator

from alignedserve.router.request_state import RequestState
from alignedserve.types import RequestKey


class DecodeQueue:
    def __init__(self) -> None:
        self._states: dict[RequestKey, RequestState] = {}
        self._real_time: dict[RequestKey, RequestState] = {}
        # (seconds at which the next token is due, number of additions before it, key) of each real-time request
        self._due: dict[RequestKey, tuple[float, int, RequestKey]] = {}
        # The same, sorted.
        self._by_due: list[tuple[float, int, RequestKey]] = []
        # Tokens of the prompts and outputs of all requests.
        self.num_tokens = 0
        # Counts additions, and all other changes after which an unsuccessful search may succeed.
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        """Yields requests in order of arrival."""
        return iter(self._states.values())

    @property
    def real_time(self) -> Collection[RequestState]:
        """Real-time requests in order of arrival."""
        return self._real_time.values()

    def soonest(self, count: int) -> list[RequestState]:
        """Returns the `count` real-time requests with the earliest due times."""
        return [self._states[key] for *_, key in self._by_due[:count]]

    def get(self, key: RequestKey) -> RequestState | None:
        return self._states.get(key)

    def add(self, state: RequestState) -> None:
        self._states[state.key] = state
        if state.is_rt:
            self._real_time[state.key] = state
            due_s = state.deadlines.token_due_s(len(state.output))
            self._due[state.key] = due = due_s, self.num_changes, state.key
            insort(self._by_due, due)
        self.num_tokens += state.num_tokens
        self.num_changes += 1

    def discard(self, state: RequestState) -> None:
        """Safe to repeat."""
        if self._states.pop(state.key, None):
            if self._real_time.pop(state.key, None):
                del self._by_due[bisect_left(self._by_due, self._due.pop(state.key))]
            self.num_tokens -= state.num_tokens
