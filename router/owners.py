"""Turns of the owners of API keys, where requests of several owners compete. Pure.

The owner with the least served work goes first (start-time fair queueing). Work is counted in tokens: those of prompts
when they start, and those of answers as they come. The level is the served work of the last owner that had a turn. An
owner that returns is counted as if it had been served that much, or as much as it was: it has earned nothing meanwhile,
and can't get more by leaving. It is forgotten when the level has passed its served work, or when nothing is open.

So an owner that wants little has its turn at once, whatever others want. Owners that want much get equal parts. With
one owner, no order changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from heapq import heappop, heappush, heapreplace
from itertools import count


class OwnerTurns:
    """The served work of each owner. It never falls, not even while the owner is forgotten."""

    def __init__(self) -> None:
        self._num_open: Counter[str] = Counter()
        # For owners with open requests, and for those that ended with more than the level.
        self._served: dict[str, float] = {}
        self._level = 0.0

    @property
    def owners(self) -> set[str]:
        return {*self._num_open, *self._served}

    @property
    def num_owners(self) -> int:
        return len(self._num_open)

    def num_open(self, owner: str) -> int:
        return self._num_open[owner]

    def served(self, owner: str) -> float:
        return self._served.get(owner, self._level)

    def opened(self, owner: str) -> None:
        if owner not in self._num_open:
            # Others owe nothing for work that they got alone. But the new one has its turn before them.
            least = min(map(self.served, self._num_open), default=self._level)
            self._raise(least - 1)
            self._served.setdefault(owner, self._level)
        self._num_open[owner] += 1

    def ended(self, owner: str) -> None:
        self._num_open[owner] -= 1
        if self._num_open[owner]:
            return
        del self._num_open[owner]
        self._raise(self._level if self._num_open else max(self._served.values()))

    def _raise(self, level: float) -> None:
        self._level = max(self._level, level)
        # Owners with open requests keep what they have less.
        if len(self._served) > len(self._num_open):
            self._served = {
                owner: served
                for owner, served in self._served.items()
                if owner in self._num_open or served > self._level
            }

    def had_turn(self, owner: str, num_tokens: int) -> None:
        """Counts a prompt that starts."""
        self._raise(self.served(owner))
        self.serve(owner, num_tokens)

    def serve(self, owner: str, num_tokens: int) -> None:
        self._served[owner] = self.served(owner) + num_tokens


class OwnerOrder:
    """The owners for which something waits somewhere, the least served first.

    Served work never falls, so an owner is moved back only when it is at the front."""

    def __init__(self, turns: OwnerTurns, waits: Callable[[str], bool]) -> None:
        self._turns = turns
        self._waits = waits
        # (served work when it was put there, number of additions, owner)
        self._heap: list[tuple[float, int, str]] = []
        self._there: set[str] = set()
        self._numbers = count()

    def add(self, owner: str) -> None:
        """Safe to repeat."""
        if owner not in self._there:
            self._there.add(owner)
            heappush(self._heap, (self._turns.served(owner), next(self._numbers), owner))

    def first(self) -> str | None:
        while self._heap:
            served, number, owner = self._heap[0]
            if not self._waits(owner):
                heappop(self._heap)
                self._there.remove(owner)
            elif served < self._turns.served(owner):
                heapreplace(self._heap, (self._turns.served(owner), number, owner))
            else:
                return owner
        return None

    def check(self, waiting: Collection[str]) -> None:
        """Raises RuntimeError unless the first of the owners for which something waits is the least served. Changes
        nothing."""
        same = OwnerOrder(self._turns, self._waits)
        same._heap, same._there = [*self._heap], {*self._there}
        first = same.first()
        least = min(map(self._turns.served, waiting), default=None)
        if (None if first is None else self._turns.served(first)) != least:
            raise RuntimeError(f"it is the turn of an owner other than the least served of {len(waiting)}")
