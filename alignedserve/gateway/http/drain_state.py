"""Whether new work is taken, and how much is inside. When the server stops, the doors close and those inside finish."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class DrainState:
    def __init__(self) -> None:
        self._closed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside: Counter[str] = Counter()

    @property
    def is_draining(self) -> bool:
        return self._closed.is_set()

    def num_open(self, holder: str) -> int:
        return self._inside[holder]

    @contextmanager
    def counted(self, holder: str) -> Iterator[None]:
        """Counts as work under way, until the block ends."""
        self._inside[holder] += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside[holder] -= 1
            if not self._inside[holder]:
                del self._inside[holder]
            if not self._inside:
                self._empty.set()

    def begin(self) -> None:
        """Nothing new is taken. Safe to repeat."""
        self._closed.set()

    async def until_draining(self) -> None:
        await self._closed.wait()

    async def until_idle(self) -> None:
        await self._empty.wait()
