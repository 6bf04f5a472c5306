"""Limits the number and the bytes of running lines. Lines enter in the order of their calls. If jobs would otherwise
miss their windows, lines of the job that expires first enter first."""

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
        """`goes_by_window` returns whether lines of the job that expires first enter before others."""
        self._goes_by_window = goes_by_window
        self._max_num_lines = max_num_lines
        self._max_bytes = max_bytes
        self._num_lines = 0
        self._num_bytes = 0
        # In the order of their calls. Each running job has one line here.
        self._waiting: list[_Waiting] = []

    async def acquire(self, num_bytes: int, expires_at: int = 0) -> None:
        """Waits until there is room. A line larger than the whole limit runs alone. `expires_at` is its job's."""
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
                # The line had entered, but its task was cancelled before it noticed.
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
