"""A fair queue for a resource with one user at a time. The next turn goes to the owner with the least recent use. Best
effort gets a turn when nothing else waits, and a small share of the time otherwise."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import NamedTuple

from alignedserve.scheduling.config import SchedulingConfig

# seconds after which an owner's use counts half
HALF_LIFE_S = 30.0
# Use below this number of seconds is forgotten.
FORGOTTEN_S = 0.001
# Least share of the time for best effort while any of it waits. The same as on instances by default.
BE_SHARE = SchedulingConfig.be_share


class _User(NamedTuple):
    is_best_effort: bool
    owner: str


class QueueTimeout(Exception):
    """Other owners had all turns until this one's patience ran out."""


class FairQueue:
    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._is_taken = False
        # The waiting turns of each owner, numbered by arrival. Cancelled ones are removed when their turn comes.
        self._waiting: dict[_User, deque[tuple[int, asyncio.Future[None]]]] = {}
        self._numbers = count()
        # Seconds of use per owner, and when they were last updated.
        self._used: dict[_User, tuple[float, float]] = {}

    @asynccontextmanager
    async def turn(self, owner: str, patience_s: float, is_best_effort: bool = False) -> AsyncIterator[None]:
        """Waits up to `patience_s` for the owner's turn, and holds it in the block. Raises QueueTimeout."""
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
                # The turn had been given to it already.
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
