"""Fair turns at something that only one can use at a time: the next turn is the owner's that has used it least
recently."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

# What an owner has used counts half after so many seconds.
HALF_LIFE_S = 30.0
# It is forgotten when it is less than so many seconds.
FORGOTTEN_S = 0.001


class QueueTimeout(Exception):
    """Other owners had all the turns for as long as this one would wait."""


class FairQueue:
    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._is_taken = False
        # What waits of each owner, numbered in the order in which it came. What is over is taken out in its turn.
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        self._numbers = count()
        # The seconds that each owner has used, and when they were last counted.
        self._used: dict[str, tuple[float, float]] = {}

    @asynccontextmanager
    async def turn(self, owner: str, patience_s: float) -> AsyncIterator[None]:
        """Waits for the owner's turn for `patience_s` at most, and holds it in the block. Raises QueueTimeout."""
        if self._is_taken:
            await self._wait(owner, patience_s)
        self._is_taken = True
        begun_s = self._clock()
        try:
            yield
        finally:
            now_s = self._clock()
            self._used[owner] = self._used_by(owner) + now_s - begun_s, now_s
            self._pass_on()

    async def _wait(self, owner: str, patience_s: float) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((next(self._numbers), waiting))
        try:
            async with asyncio.timeout(patience_s):
                await waiting
        except BaseException as error:
            if not waiting.cancelled():
                # It has been given the turn.
                self._pass_on()
            if isinstance(error, TimeoutError):
                raise QueueTimeout from None
            raise

    def _pass_on(self) -> None:
        for owner, waiting in list(self._waiting.items()):
            while waiting and waiting[0][1].done():
                waiting.popleft()
            if not waiting:
                del self._waiting[owner]
        self._is_taken = bool(self._waiting)
        if not self._waiting:
            return
        self._used = {owner: used for owner, used in self._used.items() if self._used_by(owner) > FORGOTTEN_S}
        owner = min(self._waiting, key=lambda owner: (self._used_by(owner), self._waiting[owner][0][0]))
        _, next_one = self._waiting[owner].popleft()
        next_one.set_result(None)

    def _used_by(self, owner: str) -> float:
        seconds, at_s = self._used.get(owner, (0.0, 0.0))
        return seconds * float(0.5 ** ((self._clock() - at_s) / HALF_LIFE_S))
