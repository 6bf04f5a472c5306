"""What happens to thousands at once is dealt with a few at a time, with the event loop's other work in between.

The event loop does all that is ready before it looks again at what has arrived. Where a step of the engine brings
tokens for a thousand streams, or a client hangs up on a thousand, each of them is quick, and all of them together hold
up everyone else for as long as they take.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

Work = Callable[[], None]


class FewAtOnce:
    def __init__(self, at_once: int) -> None:
        """At most `at_once` pieces of work are done in a turn of the event loop."""
        self._at_once = at_once
        # The work that waits, by its owner; the owner whose turn is next comes first.
        self._waiting: dict[str, deque[Work]] = {}
        # The number of pieces that were done in this turn.
        self._num_done = 0

    def do(self, work: Work, owner: str = "") -> None:
        """Does the work now, unless enough was done in this turn; otherwise in one of the next turns. Owners take
        turns, and the work of one owner is done in the order of the calls."""
        if self._num_done < self._at_once and not self._waiting:
            self._count()
            work()
        else:
            self._waiting.setdefault(owner, deque()).append(work)

    def _count(self) -> None:
        if not self._num_done:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._num_done += 1

    def _next_turn(self) -> None:
        self._num_done = 0
        while self._waiting and self._num_done < self._at_once:
            work = self._taken()
            # What it raises ends this turn alone: the next one is due by now.
            self._count()
            work()

    def _taken(self) -> Work:
        owner = next(iter(self._waiting))
        works = self._waiting.pop(owner)
        work = works.popleft()
        if works:
            self._waiting[owner] = works
        return work
