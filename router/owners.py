"""Turns of the owners of API keys, where requests of several owners compete. Pure.

The owner with the least served work goes first (start-time fair queueing). Work is counted in tokens: those of prompts
when they start, and those of answers as they come. The level is the served work of the last owner that had its turn. An
owner that begins to wait is counted as if it had been served that much, or as much as it was. It has earned nothing
meanwhile, whether it had left or had only an idle stream, and can't get more by leaving. An owner without open requests
is forgotten when the level has passed its served work, or when nothing is open.

So an owner that wants little has its turn at once, whatever others want. Owners that want much get equal parts. With
one owner, no order changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from copy import copy
from heapq import heappop, heappush, heapreplace
from itertools import count


class OwnerTurns:
    """The served work of each owner. It never falls, not even while the owner is forgotten."""

    def __init__(self) -> None:
        self._num_open: Counter[str] = Counter()
        # For owners with open requests, and for those that ended with more than the level.
        self._served: dict[str, float] = {}
        self._level = 0.0
        # The served work of the owner that has ever had most.
        self._most = 0.0
        # The owners that wait, for each place where they do.
        self.orders: list[OwnerOrder] = []

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

    def ended(self, owner: str) -> None:
        self._num_open[owner] -= 1
        if self._num_open[owner]:
            return
        del self._num_open[owner]
        self._raise(self._level if self._num_open else self._most)

    def begins_to_wait(self, owner: str) -> None:
        """Called before something of the owner waits. Does nothing if something of it waits anywhere."""
        if any(order.waits(owner) for order in self.orders):
            return
        leasts = [self.served(first) for order in self.orders if (first := order.first()) is not None]
        # Others owe nothing for work that they got alone. But this one has its turn before them.
        if (level := max(leasts, default=self._most) - 1) > self._level:
            self._raise(level)
        self._served[owner] = max(self.served(owner), self._level)

    def _raise(self, level: float) -> None:
        self._level = max(self._level, level)
        # Owners with open requests keep what they have less, because something of them may wait.
        if len(self._served) > len(self._num_open):
            self._served = {
                owner: served
                for owner, served in self._served.items()
                if owner in self._num_open or served > self._level
            }

    def had_turn(self, owner: str, num_tokens: int) -> None:
        """Counts a prompt that starts because its owner is the least served one that waits."""
        self._raise(self.served(owner))
        self.serve(owner, num_tokens)

    def serve(self, owner: str, num_tokens: int) -> None:
        self._served[owner] = self.served(owner) + num_tokens
        self._most = max(self._most, self._served[owner])


class OwnerOrder:
    """The owners for which something waits somewhere, the least served first.

    Served work never falls, so an owner is moved back only when it is at the front."""

    def __init__(self, turns: OwnerTurns, waits: Callable[[str], bool]) -> None:
        """`waits` returns whether something of the owner waits there."""
        self._turns = turns
        self.waits = waits
        turns.orders.append(self)
        # (served work when it was put there, number of additions, owner)
        self._heap: list[tuple[float, int, str]] = []
        self._there: set[str] = set()
        self._numbers = count()

    def add(self, owner: str) -> None:
        """Called before something of the owner waits. Safe to repeat."""
        self._turns.begins_to_wait(owner)
        if owner not in self._there:
            self._there.add(owner)
            heappush(self._heap, (self._turns.served(owner), next(self._numbers), owner))

    def first(self) -> str | None:
        while self._heap:
            served, number, owner = self._heap[0]
            if not self.waits(owner):
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
        same = copy(self)
        same._heap, same._there = [*self._heap], {*self._there}
        first = same.first()
        least = min(map(self._turns.served, waiting), default=None)
        if (None if first is None else self._turns.served(first)) != least:
            raise RuntimeError(f"it is the turn of an owner other than the least served of {len(waiting)}")
