"""Requests that wait for prefill, the most urgent first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from router.entry import Entry, State
from router.fleet import PrefillView


class PrefillQueue:
    def __init__(self) -> None:
        # (due, number, request); a request that has left meanwhile, or came again, is skipped
        self._heap: list[tuple[float, int, Entry]] = []
        self._numbers: dict[int, int] = {}
        self._missing: dict[int, int] = {}
        # tokens to compute of all of them
        self.num_tokens = 0
        self._num_pushed = 0
        # nothing starts until something was released
        self.pool_is_full = False

    def __len__(self) -> int:
        return len(self._numbers)

    def push(self, entry: Entry, due_s: float) -> None:
        self.discard(entry)
        self._num_pushed += 1
        self._missing[entry.key] = entry.num_missing
        self.num_tokens += entry.num_missing
        self._numbers[entry.key] = self._num_pushed
        heapq.heappush(self._heap, (due_s, self._num_pushed, entry))

    def discard(self, entry: Entry) -> None:
        """Safe to repeat."""
        self._numbers.pop(entry.key, None)
        self.num_tokens -= self._missing.pop(entry.key, 0)

    def startable(self, prefills: list[PrefillView], num_reserving: int, window: int) -> Iterator[Entry]:
        """Requests to ask room for, as many as keep prefill instances busy for `window` iterations."""
        if self.pool_is_full:
            return
        room = sum(window * view.hello.limits.max_num_batched_tokens - view.num_pending for view in prefills)
        room -= num_reserving
        while self._heap and room > 0:
            _, number, entry = heapq.heappop(self._heap)
            if self._numbers.get(entry.key) == number and entry.state is State.QUEUED:
                self.discard(entry)
                room -= entry.num_missing
                yield entry
