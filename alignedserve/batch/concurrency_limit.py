"""A limit on the lines that run, in number and in bytes. Lines are let in in the order in which they ask; or those of
the job that expires first before others, while that is what it takes for jobs to be done in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class _Waiting:
    entered: asyncio.Future[None]
    num_bytes: int
    expires_at: int


class ConcurrencyLimit:
    def __init__(
        self, max_num_lines: int, max_bytes: int, goes_by_window: Callable[[], bool] = lambda: False
    ) -> None:
        """`goes_by_window` returns whether lines of the job that expires first go before others."""
        self._goes_by_window = goes_by_window
        self._max_num_lines = max_num_lines
        self._max_bytes = max_bytes
        self._num_lines = 0
        self._num_bytes = 0
        # In the order in which they have asked: of each job that runs there is one.
        self._waiting: list[_Waiting] = []

    async def acquire(self, num_bytes: int, expires_at: int = 0) -> None:
        """Waits until there is room; a line that needs more than all of it gets all of it. `expires_at` is that of its
        job."""
        if not self._waiting and self._fits(num_bytes):
            self._take(num_bytes)
            return
        place = _Waiting(asyncio.get_running_loop().create_future(), num_bytes, expires_at)
        self._waiting.append(place)
        try:
            await place.entered
        except asyncio.CancelledError:
            if place.entered.cancelled():
                self._waiting.remove(place)
                self._let_in()
            else:
                # The line was let in, but its task was cancelled before it could notice.
                self.release(num_bytes)
            raise

    def release(self, num_bytes: int) -> None:
        self._num_lines -= 1
        self._num_bytes -= num_bytes
        self._let_in()

    @property
    def is_empty(self) -> bool:
        return not (self._num_lines or self._num_bytes or self._waiting)

    def _let_in(self) -> None:
        while waiting := [each for each in self._waiting if not each.entered.cancelled()]:
            next_one = (
                min(waiting, key=lambda each: each.expires_at) if self._goes_by_window() else waiting[0]
            )
            if not self._fits(next_one.num_bytes):
                return
            self._take(next_one.num_bytes)
            self._waiting.remove(next_one)
            next_one.entered.set_result(None)

    def _fits(self, num_bytes: int) -> bool:
        if self._num_lines == self._max_num_lines:
            return False
        return self._num_bytes == 0 or self._num_bytes + num_bytes <= self._max_bytes

    def _take(self, num_bytes: int) -> None:
        self._num_lines += 1
        self._num_bytes += num_bytes
