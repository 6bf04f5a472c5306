"""How a gateway ends: it drains while the system stops, retires when another has replaced it, or stops at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from alignedserve.gateway.http.access import DrainState
from alignedserve.gateway.http.server import HttpServer
from alignedserve.gateway.services import StoreServices

# seconds that a replaced gateway has to finish its open requests and batch lines
RETIRE_S = 600.0


class Ending:
    def __init__(self, services: StoreServices, shutdown_timeout_s: float, stop: Callable[[], None]) -> None:
        """`stop` ends the gateway at once, and is safe to repeat."""
        self.drain_state = DrainState()
        self._services = services
        self._shutdown_timeout_s = shutdown_timeout_s
        self._stop = stop
        # Tasks that wait until open requests have finished.
        self._draining: asyncio.Task[None] | None = None
        self._retiring: asyncio.Task[None] | None = None

    def drain(self) -> None:
        """Called when the system stops: refuses new requests and begins no batch line. Stops when running requests have
        finished, or after `--shutdown-timeout`. Safe to repeat."""
        self.drain_state.begin()
        if self._draining is None:
            if self._retiring:
                # The shutdown timeout applies now instead of RETIRE_S.
                self._retiring.cancel()
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    def retire(self, server: HttpServer) -> None:
        """Called when another gateway has replaced this one: accepts no connections, begins no batch line, and stops
        when all open work has finished. Safe to repeat."""
        if self._draining is None and self._retiring is None:
            self._retiring = asyncio.get_running_loop().create_task(self._retire(server))

    def signalled(self) -> None:
        """Drains at the first SIGTERM, stops at once at the second."""
        self._stop() if self.drain_state.is_draining else self.drain()

    def cancel(self) -> None:
        """Waits no longer for open requests, because the gateway has stopped."""
        for task in (self._draining, self._retiring):
            if task:
                task.cancel()

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._shutdown_timeout_s):
                await self._services.end_lines(self._shutdown_timeout_s)
                await self.drain_state.until_idle()
        self._stop()

    async def _retire(self, server: HttpServer) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETIRE_S):
                await asyncio.gather(
                    server.retire(), self._services.end_lines(RETIRE_S), self._services.leave_responses()
                )
        self._stop()
