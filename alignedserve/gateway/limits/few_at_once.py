"""Does large numbers of small tasks a few at a time, and leaves the event loop room for its other work.

The event loop runs all ready callbacks before it polls for input. An iteration may bring tokens for a thousand streams,
and a client may disconnect a thousand at once. Each takes little time, but together they delay everything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Work = Callable[[], None]


class FewAtOnce:
    def __init__(self, at_once: int) -> None:
        """`at_once` is how many tasks run in one turn of the event loop, at most."""
        self._at_once = at_once
        self._urgent, self._patient = _WaitingWork(), _WaitingWork()
        # Total weight of the tasks done in this turn.
        self._done = 0

    def do(self, work: Work, owner: str = "", *, weight: int = 1, is_patient: bool = False) -> None:
        """Does the work now if this turn has room for it, and in a later turn otherwise.

        Owners take turns, and work of one owner keeps its order. It counts as `weight` tasks. Patient work gets the
        rest of each turn, but at least one task per turn. The same work waits only once at a time."""
        can_pass = not is_patient or not self._patient
        if self._done < self._at_once and not self._urgent and can_pass:
            self._do(work, weight)
        else:
            (self._patient if is_patient else self._urgent).add(owner, work, weight)

    def drop(self, work: Work, owner: str = "") -> None:
        """Forgets work that waits and is not patient. Safe to repeat."""
        self._urgent.drop(owner, work)

    def _do(self, work: Work, weight: int) -> None:
        if not self._done:
            asyncio.get_running_loop().call_soon(self._next_turn)
        # An exception ends only this turn: the next one is scheduled by now.
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


class _WaitingWork:
    """Waiting work and its weight, by owner. The owner with the next turn comes first."""

    def __init__(self) -> None:
        self._works: dict[str, dict[Work, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._works)

    def add(self, owner: str, work: Work, weight: int) -> None:
        self._works.setdefault(owner, {})[work] = weight

    def drop(self, owner: str, work: Work) -> None:
        works = self._works.get(owner, {})
        if works.pop(work, None) is not None and not works:
            del self._works[owner]

    def take(self) -> tuple[Work, int]:
        owner = next(iter(self._works))
        works = self._works.pop(owner)
        work = next(iter(works))
        weight = works.pop(work)
        if works:
            self._works[owner] = works
        return work, weight
