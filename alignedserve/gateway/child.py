"""A process that works for this one, and can be stopped at it, which a thread can't.

It is asked for one thing after the other, in frames of four bytes of length and then the content; it answers each.
It ends with its stdin. What ends it, a signal of its own timer or the kernel, is heard by whoever asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import BinaryIO

_LENGTH_BYTES = 4


class ChildEnded(Exception):
    """It ended over what it was asked, twice unless its timer ended it."""

    def __init__(self, status: int) -> None:
        """`status`: its exit status, or the number of the signal that ended it, below 0."""
        super().__init__(f"it ended with status {status}")
        self.status = status


class Child:
    """Starts when it is first needed, and again when it has ended."""

    def __init__(self, module: str, greeting: Callable[[], bytes], patience_s: float) -> None:
        """`module`: its program. It is told `greeting` first, and answers that with an empty frame. One that answers
        nothing for `patience_s`, which is longer than its own timer, hangs: it is killed."""
        self._module = module
        self._greeting = greeting
        self._patience_s = patience_s
        self._process: asyncio.subprocess.Process | None = None
        # A task, because a start that is cancelled on its way may never come to an end (in asyncio of Python 3.11).
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        # one thing at a time
        self._turn = asyncio.Lock()
        self._asking: set[asyncio.Task[bytes]] = set()

    async def prepare(self) -> None:
        """Whoever asks first need not wait until it is there. Raises ChildEnded."""
        async with self._turn:
            await self._ready()

    async def ask(self, content: bytes) -> bytes:
        """The answer. Whoever stops waiting before its turn is not asked for; later it goes on: its answer must not be
        taken for another one's. What ends it other than its timer is tried once more. Raises ChildEnded."""
        await self._turn.acquire()
        asking = asyncio.create_task(self._ask(content))
        self._asking.add(asking)
        asking.add_done_callback(self._over)
        return await asyncio.shield(asking)

    async def aclose(self) -> None:
        for asking in self._asking:
            asking.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        if self._starting is not None:
            self._process = await self._starting
        if self._process is not None:
            # it may be in the middle of something
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._status()

    async def _ask(self, content: bytes) -> bytes:
        try:
            return await self._told(await self._ready(), content)
        except ChildEnded as ended:
            if ended.status == -signal.SIGALRM:
                raise
            # it had just ended by itself, after its last answer; or somebody killed it
            return await self._told(await self._ready(), content)
        finally:
            self._turn.release()

    async def _ready(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._starting = self._starting or asyncio.create_task(self._started())
            process = await asyncio.shield(self._starting)
            self._starting, self._process = None, process
            await self._told(process, self._greeting())
        return self._process

    async def _started(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            # a ctrl-C in the terminal is not for it: it ends when its stdin does
            start_new_session=True,
        )

    async def _told(self, process: asyncio.subprocess.Process, content: bytes) -> bytes:
        try:
            async with asyncio.timeout(self._patience_s):
                return await _exchanged(process, content)
        except TimeoutError:
            process.kill()
            await self._status()
            raise ChildEnded(-signal.SIGALRM) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ChildEnded(await self._status()) from None

    async def _status(self) -> int:
        """Of the process, which has ended. (To kill it once more could take its status from whoever waits for it.)"""
        process, self._process = self._process, None
        return 0 if process is None else await process.wait()

    def _over(self, asking: asyncio.Task[bytes]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled():
            # it is heard by whoever waits, if anyone does
            asking.exception()


async def _exchanged(process: asyncio.subprocess.Process, content: bytes) -> bytes:
    assert process.stdin and process.stdout
    process.stdin.write(len(content).to_bytes(_LENGTH_BYTES, "big"))
    process.stdin.write(content)
    await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(_LENGTH_BYTES), "big")
    return await process.stdout.readexactly(length)


# ---- the child's side ----


def read_frame(source: BinaryIO) -> bytes | None:
    """None at the end."""
    size = source.read(_LENGTH_BYTES)
    return source.read(int.from_bytes(size, "big")) if size else None


def write_frame(answers: BinaryIO, content: bytes) -> None:
    answers.write(len(content).to_bytes(_LENGTH_BYTES, "big"))
    answers.write(content)
    answers.flush()
