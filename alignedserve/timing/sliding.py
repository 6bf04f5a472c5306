"""The smallest and the largest number of the last minute. Pure."""

from __future__ import annotations

from collections import deque

# Length of the sliding windows, in seconds. For a policy, it bridges the gaps between bursts.
MEMORY_S = 60.0


class SlidingMinimum:
    """The smallest number that was added within the last MEMORY_S seconds."""

    def __init__(self) -> None:
        # Pairs of time and number, both ascending. A number is dropped when one that is no larger is added.
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
    """The largest number that was added within the last MEMORY_S seconds."""

    def __init__(self) -> None:
        # Holds the negated numbers: the smallest of these is the negated largest number.
        self._negated = SlidingMinimum()

    def add(self, number: float, now: float) -> None:
        self._negated.add(-number, now)

    def value(self, default: float, now: float) -> float:
        return -self._negated.value(-default, now)
