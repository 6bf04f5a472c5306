"""Whether new requests are accepted, and how many are running.

When the server stops, it accepts no new requests, and running ones finish.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class DrainState:
    def __init__(self) -> None:
        self._draining = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_open: Counter[str] = Counter()

    @property
    def is_draining(self) -> bool:
        return self._draining.is_set()

    def num_open(self, owner: str) -> int:
        return self._num_open[owner]

    @contextmanager
    def counted(self, owner: str) -> Iterator[None]:
        """Counts a request of `owner` as running, until the block ends."""
        self._num_open[owner] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open[owner] -= 1
            if not self._num_open[owner]:
                del self._num_open[owner]
            if not self._num_open:
                self._idle.set()

    def begin(self) -> None:
        """Stops accepting new requests. Safe to repeat."""
        self._draining.set()

    async def until_draining(self) -> None:
        await self._draining.wait()

    async def until_idle(self) -> None:
        await self._idle.wait()
