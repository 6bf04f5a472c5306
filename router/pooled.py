"""Requests that wait in the pool for a decode instance."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator

from alignedserve.router.entry import Entry
from alignedserve.types import RequestKey


class Pooled:
    def __init__(self) -> None:
        self._entries: dict[RequestKey, Entry] = {}
        self._real_time: dict[RequestKey, Entry] = {}
        # of those, when the next token is due; by that, and then in the order in which they came
        self._due: dict[RequestKey, tuple[float, int, RequestKey]] = {}
        self._by_due: list[tuple[float, int, RequestKey]] = []
        self.num_tokens = 0
        # additions so far, and whatever else gives searches that found nothing a new chance
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Those that came first first."""
        return iter(self._entries.values())

    @property
    def real_time(self) -> Collection[Entry]:
        """Likewise, of that class."""
        return self._real_time.values()

    def soonest(self, count: int) -> list[Entry]:
        """Of real time, so many that are due first."""
        return [self._entries[key] for *_, key in self._by_due[:count]]

    def get(self, key: RequestKey) -> Entry | None:
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        if entry.is_rt:
            self._real_time[entry.key] = entry
            due_s = entry.deadlines.token_due_s(len(entry.output))
            self._due[entry.key] = due = due_s, self.num_changes, entry.key
            insort(self._by_due, due)
        self.num_tokens += entry.num_tokens
        self.num_changes += 1

    def discard(self, entry: Entry) -> None:
        """Safe to repeat."""
        if self._entries.pop(entry.key, None):
            if self._real_time.pop(entry.key, None):
                del self._by_due[bisect_left(self._by_due, self._due.pop(entry.key))]
            self.num_tokens -= entry.num_tokens
