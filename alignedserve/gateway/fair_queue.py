"""Fair turns at something that only one can use at a time: the next turn is the owner's that has used it least
recently. Best effort gets turns when nothing else waits, and a small share of the time at least."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import NamedTuple

from alignedserve.scheduling.config import SchedulingConfig

# The seconds after which what an owner has used counts half.
HALF_LIFE_S = 30.0
# It is forgotten when it is less than this number of seconds.
FORGOTTEN_S = 0.001
# The share of the time that best effort gets at least, while any of it waits: as much as of instances by default.
BE_SHARE = SchedulingConfig.be_share


class _User(NamedTuple):
    is_best_effort: bool
    owner: str


class QueueTimeout(Exception):
    """Other owners had all the turns for as long as this one would wait."""


class FairQueue:
    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._is_taken = False
        # What waits of each owner, numbered in the order in which it came. What is over is taken out in its turn.
        self._waiting: dict[_User, deque[tuple[int, asyncio.Future[None]]]] = {}
        self._numbers = count()
        # The seconds that each owner has used, and when they were last counted.
        self._used: dict[_User, tuple[float, float]] = {}

    @asynccontextmanager
    async def turn(self, owner: str, patience_s: float, is_best_effort: bool = False) -> AsyncIterator[None]:
        """Waits for the owner's turn for `patience_s` at most, and holds it in the block. Raises QueueTimeout."""
        user = _User(is_best_effort, owner)
        if self._is_taken:
            await self._wait(user, patience_s)
        self._is_taken = True
        begun_s = self._clock()
        try:
            yield
        finally:
            now_s = self._clock()
            self._used[user] = self._used_by(user) + now_s - begun_s, now_s
            self._pass_on()

    async def _wait(self, user: _User, patience_s: float) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(user, deque()).append((next(self._numbers), waiting))
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
        for user, waiting in list(self._waiting.items()):
            while waiting and waiting[0][1].done():
                waiting.popleft()
            if not waiting:
                del self._waiting[user]
        self._is_taken = bool(self._waiting)
        if not self._waiting:
            return
        self._used = {user: used for user, used in self._used.items() if self._used_by(user) > FORGOTTEN_S}
        gives_best_effort = self._owes_best_effort()
        user = min(
            self._waiting,
            key=lambda user: (
                user.is_best_effort != gives_best_effort,
                self._used_by(user),
                self._waiting[user][0][0],
            ),
        )
        _, next_one = self._waiting[user].popleft()
        next_one.set_result(None)

    def _owes_best_effort(self) -> bool:
        """Whether best effort has had less than its share."""
        used = {user: self._used_by(user) for user in self._used}
        of_best_effort = sum(seconds for user, seconds in used.items() if user.is_best_effort)
        return of_best_effort < BE_SHARE * sum(used.values())

    def _used_by(self, user: _User) -> float:
        seconds, at_s = self._used.get(user, (0.0, 0.0))
        return seconds * float(0.5 ** ((self._clock() - at_s) / HALF_LIFE_S))
