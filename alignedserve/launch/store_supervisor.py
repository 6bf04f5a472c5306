"""Keeps the private Redis running. It is a child process of the launcher, so that it does not depend on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from alignedserve.launch.console import Alarm
from alignedserve.launch.process_supervisor import ProcessFailed
from alignedserve.launch.store import StoreLocation, end_process, until_answering
from alignedserve.process import HANG_S
from alignedserve.store.server import PrivateServer

# seconds between attempts to start Redis again, at first and at most. Real-time traffic goes on without it.
RETRY_S, MAX_RETRY_S = 0.1, 10.0
# seconds after which a Redis that is up counts as working. (On a full disk it starts, and ends at its first write.)
STEADY_S = 60.0
# seconds between two checks whether Redis answers, and the longest wait for each answer
_ASK_S = 1.0
# seconds after its start within which Redis must answer, at least that it is loading
_START_S = 60.0


@dataclass
class RestartPauses:
    """The pauses between the end of a run and the start of the next. Each is longer, until a run lasts."""

    _next_s: float = RETRY_S

    def after(self, up_s: float) -> float:
        """Returns the pause in seconds after a run that was up for `up_s` seconds."""
        if up_s >= STEADY_S:
            self._next_s = RETRY_S
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, MAX_RETRY_S)
        return pause_s


class StoreSupervisor:
    def __init__(
        self, location: StoreLocation, say: Callable[[str], None], silence_s: float = HANG_S
    ) -> None:
        """A Redis that does not answer for `silence_s` seconds is killed."""
        self._location = location
        self._say = say
        self._silence_s = silence_s
        self._is_up = asyncio.Event()
        self._stop = asyncio.Event()
        # the last printed reason why Redis does not start
        self._said = ""

    async def until_up(self) -> None:
        await self._is_up.wait()

    def stop(self) -> None:
        self._stop.set()

    async def supervise(self) -> None:
        """Runs until `stop`. Raises ProcessFailed if Redis does not start even once."""
        if self._location.server is None:
            self._is_up.set()
            await self._stop.wait()
            return
        pauses = RestartPauses()
        while not self._stop.is_set():
            up_s = await self._run_once(self._location.server)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pauses.after(up_s)):
                    await self._stop.wait()

    async def _run_once(self, server: PrivateServer) -> float:
        """Runs Redis until it ends, and returns the seconds that it was up."""
        start_s = time.monotonic()
        process = await server.start()
        self._location.note(process.pid)
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stop.wait())
        answering = asyncio.create_task(until_answering(server.url))
        silent = asyncio.create_task(self._kill_when_silent(server, process, answering))
        try:
            await asyncio.wait({ended, stopping, answering}, return_when=asyncio.FIRST_COMPLETED)
            was_up, up_since_s = answering.done(), time.monotonic()
            if was_up:
                self._say(f"redis is up after {up_since_s - start_s:.1f} s: pid {process.pid}")
                self._is_up.set()
                self._said = ""
                await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not stopping.done():
                self._ended(server.why_ended(process.pid, ended.result()), was_up)
            return time.monotonic() - up_since_s if was_up else 0.0
        finally:
            for task in (answering, stopping, silent):
                task.cancel()
            await end_process(process, ended)

    def _ended(self, why: str, was_up: bool) -> None:
        if was_up:
            self._say(Alarm(f"redis is down; starting it again ({why})"))
        elif not self._is_up.is_set():
            raise ProcessFailed(f"redis does not start: {why}")
        elif why != self._said:
            self._said = why
            self._say(Alarm(f"redis does not start again, and is tried further: {why}"))

    async def _kill_when_silent(
        self, server: PrivateServer, process: asyncio.subprocess.Process, answering: asyncio.Task[None]
    ) -> None:
        """Kills Redis when it does not answer. Unanswered checks are counted, not seconds, because this process itself
        may have been stopped."""
        num_missed, was_heard = 0, False
        while num_missed < _num_questions(self._silence_s if was_heard else _START_S):
            pause = asyncio.create_task(asyncio.sleep(_ASK_S))
            try:
                is_heard = await server.answers(_ASK_S)
                await pause
            finally:
                pause.cancel()
            was_heard = was_heard or is_heard or answering.done()
            num_missed = 0 if is_heard else num_missed + 1
        self._say(Alarm(f"redis answers nothing for {num_missed * _ASK_S:g} s; killing it"))
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def _num_questions(seconds: float) -> int:
    return max(2, math.ceil(seconds / _ASK_S))
