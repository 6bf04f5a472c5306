"""Turns of the owners of API keys, where requests of several owners compete. Pure.

The owner with the least served work goes first (start-time fair queueing). Work is counted in tokens: those of prompts
when they start, and those of answers as they come. An owner without open requests is forgotten. When it returns, it is
counted as if it had been served like the last one that had a turn. It has earned nothing meanwhile, and owes nothing.

So an owner that wants little has its turn at once, whatever others want. Owners that want much get equal parts. With
one owner, no order changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from heapq import heappop, heappush, heapreplace
from itertools import count


class OwnerTurns:
    """The served work of each owner with open requests."""

    def __init__(self) -> None:
        self._num_open: Counter[str] = Counter()
        self._served: dict[str, float] = {}
        # The served work of the last owner that had a turn, at that time.
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
        self._num_open[owner] += 1
        self._served.setdefault(owner, self._level)

    def ended(self, owner: str) -> None:
        self._num_open[owner] -= 1
        if not self._num_open[owner]:
            del self._num_open[owner], self._served[owner]

    def had_turn(self, owner: str, num_tokens: int) -> None:
        """Counts a prompt that starts."""
        self._level = max(self._level, self.served(owner))
        self.serve(owner, num_tokens)

    def serve(self, owner: str, num_tokens: int) -> None:
        self._served[owner] = self.served(owner) + num_tokens


class OwnerOrder:
    """The owners for which something waits somewhere, the least served first.

    Served work only grows while an owner is known, so an owner is moved back only when it is at the front. One that
    returns may have less than before."""

    def __init__(self, turns: OwnerTurns, waits: Callable[[str], bool]) -> None:
        self._turns = turns
        self._waits = waits
        # (served work when it was put there, number of additions, owner)
        self._heap: list[tuple[float, int, str]] = []
        # The entry of each owner that counts. Others are left from before an owner returned with less served work.
        self._entries: dict[str, tuple[float, int, str]] = {}
        self._numbers = count()

    def add(self, owner: str) -> None:
        """Safe to repeat."""
        there, served = self._entries.get(owner), self._turns.served(owner)
        if there is None or there[0] > served:
            self._entries[owner] = entry = served, next(self._numbers), owner
            heappush(self._heap, entry)

    def first(self) -> str | None:
        while self._heap:
            served, number, owner = entry = self._heap[0]
            if entry is not self._entries.get(owner):
                heappop(self._heap)
            elif not self._waits(owner):
                heappop(self._heap)
                del self._entries[owner]
            elif served < self._turns.served(owner):
                self._entries[owner] = entry = self._turns.served(owner), number, owner
                heapreplace(self._heap, entry)
            else:
                return owner
        return None

    def check(self, waiting: Collection[str]) -> None:
        """Raises RuntimeError unless the first of the owners for which something waits is the least served. Changes
        nothing."""
        same = OwnerOrder(self._turns, self._waits)
        same._heap, same._entries = [*self._heap], {**self._entries}
        first = same.first()
        least = min(map(self._turns.served, waiting), default=None)
        if (None if first is None else self._turns.served(first)) != least:
            raise RuntimeError(f"it is the turn of an owner other than the least served of {len(waiting)}")
