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
        self._urgent, self._patient = _Waiting(), _Waiting()
        # The weight of the pieces that were done in this turn.
        self._done = 0

    def do(self, work: Work, owner: str = "", *, weight: int = 1, is_patient: bool = False) -> None:
        """Does the work now, unless enough was done in this turn; otherwise in one of the next turns. Owners take
        turns, and the work of one owner is done in the order of the calls. A piece counts as `weight` of them. Patient
        work has what other work leaves of a turn, and one piece in each turn at least."""
        can_pass = not is_patient or not self._patient
        if self._done < self._at_once and not self._urgent and can_pass:
            self._do(work, weight)
        else:
            (self._patient if is_patient else self._urgent).add(owner, work, weight)

    def _do(self, work: Work, weight: int) -> None:
        if not self._done:
            asyncio.get_running_loop().call_soon(self._next_turn)
        # What the work raises ends this turn alone: the next one is due by now.
        self._done += weight
        work()

    def _next_turn(self) -> None:
        self._done = 0
        num_kept = 1 if self._patient else 0
        while self._urgent and self._done < max(self._at_once - num_kept, 1):
            self._do(*self._urgent.take())
        while self._patient and (num_kept or self._done < self._at_once):
            num_kept = 0
            self._do(*self._patient.take())


class _Waiting:
    """The work that waits, by its owner; the owner whose turn is next comes first."""

    def __init__(self) -> None:
        self._works: dict[str, deque[tuple[Work, int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._works)

    def add(self, owner: str, work: Work, weight: int) -> None:
        self._works.setdefault(owner, deque()).append((work, weight))

    def take(self) -> tuple[Work, int]:
        owner = next(iter(self._works))
        works = self._works.pop(owner)
        found = works.popleft()
        if works:
            self._works[owner] = works
        return found
