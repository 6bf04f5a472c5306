"""Keeps the private Redis running. It is a child of the launcher's, so that nothing of it goes through Ray."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from alignedserve.launch.keeper import PartFailed
from alignedserve.launch.store import StoreSite, end_process, until_answering
from alignedserve.store.server import PrivateServer

# Between attempts to start it again: at first, and at most. Real-time traffic goes on without it.
_RETRY_S, _MAX_RETRY_S = 0.1, 10.0


class StoreKeeper:
    def __init__(self, site: StoreSite, say: Callable[[str], None]) -> None:
        self._site = site
        self._say = say
        self._is_up = asyncio.Event()
        self._stop = asyncio.Event()

    async def until_up(self) -> None:
        await self._is_up.wait()

    def stop(self) -> None:
        self._stop.set()

    async def keep(self) -> None:
        """Until it is told to stop. Raises PartFailed when it does not run even once."""
        if self._site.server is None:
            self._is_up.set()
            await self._stop.wait()
            return
        pause_s = _RETRY_S
        while not self._stop.is_set():
            if await self._run_once(self._site.server):
                pause_s = _RETRY_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)

    async def _run_once(self, server: PrivateServer) -> bool:
        """Whether it came up."""
        start_s = time.monotonic()
        process = await server.start()
        self._site.note(process.pid)
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stop.wait())
        answering = asyncio.create_task(until_answering(server.url))
        try:
            await asyncio.wait({ended, stopping, answering}, return_when=asyncio.FIRST_COMPLETED)
            was_up = answering.done()
            if was_up:
                self._say(f"redis is up after {time.monotonic() - start_s:.1f} s: pid {process.pid}")
                self._is_up.set()
                await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not stopping.done():
                self._ended(server, was_up)
            return was_up
        finally:
            answering.cancel()
            stopping.cancel()
            await end_process(process, ended)

    def _ended(self, server: PrivateServer, was_up: bool) -> None:
        if was_up:
            self._say("redis is down; starting it again")
        elif not self._is_up.is_set():
            raise PartFailed(f"redis does not start: {server.last_words()}")
