"""Looks for work in the store: when it is woken, and at intervals, because other processes may have added some."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from alignedserve.store.homes.base import StoreAway

log = logging.getLogger(__name__)


class StorePoller:
    def __init__(self, look: Callable[[], Awaitable[None]], every_s: float, what: str) -> None:
        """`what` names the work in the log. `look` may raise StoreAway."""
        self._look = look
        self._every_s = every_s
        self._what = what
        self._wake = asyncio.Event()
        self._is_stopped = False

    def wake(self) -> None:
        """Makes the next look happen now."""
        self._wake.set()

    def stop(self) -> None:
        self._is_stopped = True
        self._wake.set()

    async def run(self) -> None:
        """Runs until it is stopped, whatever a look raises."""
        while not self._is_stopped:
            self._wake.clear()
            try:
                with contextlib.suppress(StoreAway):
                    await self._look()
            except Exception:
                # If this ended, the gateway would silently do no such work any more.
                log.exception("looking for %s failed, and is tried again", self._what)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._wake.wait()
