"""A limit on the lines that run, in number and in bytes. Lines are let in in the order in which they ask."""

from __future__ import annotations

import asyncio
from collections import deque


class ConcurrencyLimit:
    def __init__(self, max_num_lines: int, max_bytes: int) -> None:
        self._max_num_lines = max_num_lines
        self._max_bytes = max_bytes
        self._num_lines = 0
        self._num_bytes = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def acquire(self, num_bytes: int) -> None:
        """Waits until there is room; a line that needs more than all of it gets all of it."""
        if not self._waiting and self._fits(num_bytes):
            self._take(num_bytes)
            return
        place = asyncio.get_running_loop().create_future(), num_bytes
        self._waiting.append(place)
        try:
            await place[0]
        except asyncio.CancelledError:
            if place[0].cancelled():
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
        while self._waiting:
            entered, num_bytes = self._waiting[0]
            if not entered.cancelled():
                if not self._fits(num_bytes):
                    return
                self._take(num_bytes)
                entered.set_result(None)
            self._waiting.popleft()

    def _fits(self, num_bytes: int) -> bool:
        if self._num_lines == self._max_num_lines:
            return False
        return self._num_bytes == 0 or self._num_bytes + num_bytes <= self._max_bytes

    def _take(self, num_bytes: int) -> None:
        self._num_lines += 1
        self._num_bytes += num_bytes
