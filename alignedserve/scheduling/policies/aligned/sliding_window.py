"""The smallest, and the largest, of the numbers that were seen within the last minute. Pure."""

from __future__ import annotations

from collections import deque

MEMORY_S = 60.0


class SlidingMinimum:
    def __init__(self) -> None:
        # Pairs of time and number, both ascending: a number is dropped when a later one is no larger.
        self._seen: deque[tuple[float, float]] = deque()

    def add(self, number: float, now: float) -> None:
        while self._seen and self._seen[-1][1] >= number:
            self._seen.pop()
        self._seen.append((now, number))

    def value(self, default: float, now: float) -> float:
        while self._seen and self._seen[0][0] < now - MEMORY_S:
            self._seen.popleft()
        return self._seen[0][1] if self._seen else default


class SlidingMaximum:
    def __init__(self) -> None:
        # The negated numbers: the smallest of them is the largest of the numbers.
        self._negated = SlidingMinimum()

    def add(self, number: float, now: float) -> None:
        self._negated.add(-number, now)

    def value(self, default: float, now: float) -> float:
        return -self._negated.value(-default, now)
