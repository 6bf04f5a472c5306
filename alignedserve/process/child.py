"""A child process that works for this one and, unlike a thread, can be stopped while it works.

Requests and answers are frames: four bytes of length and then the content. The child ends when its stdin does. If
something else ends it, a signal of its own timer or of the kernel, the caller is told so. `Child` makes one request
after the other; callers which need it otherwise use `start`, `tell` and `hear`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import BinaryIO

_LENGTH_BYTES = 4
# The bytes that a pipe holds.
_STEP_BYTES = 64 << 10


# The exceptions that mean that the child has ended.
ENDED = (asyncio.IncompleteReadError, ConnectionError)


class ChildEnded(Exception):
    """The child ended while it worked on a request, twice unless its own timer ended it."""

    def __init__(self, status: int) -> None:
        """`status` is its exit status, or minus the number of the signal that ended it."""
        super().__init__(f"it ended with status {status}")
        self.status = status

    @property
    def is_timed_out(self) -> bool:
        """Whether its own timer ended it, by the clock or by the processor's time."""
        return self.status in (-signal.SIGALRM, -signal.SIGPROF)


class NotStarted(ChildEnded):
    """The child ended before it had answered its greeting, or there is none."""


class Child:
    """A child process which starts when it is first needed, and again when it has ended."""

    def __init__(
        self, module: str, patience_s: float, greeting: Callable[[], Sequence[bytes]] | None = None
    ) -> None:
        """`module` is its program. It is sent the pieces of `greeting` first, if there is one, and answers that with an
        empty frame.
        A child which answers nothing for `patience_s` seconds, which is longer than its own timer, hangs: it is
        killed."""
        self._module = module
        self._greeting = greeting
        self._patience_s = patience_s
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        # There is one request at a time.
        self._turn = asyncio.Lock()
        self._at_work: set[asyncio.Task[bytes]] = set()

    async def prepare(self) -> None:
        """Starts the child, so that the first request need not wait for that. Raises ChildEnded."""
        await self._in_turn(self._prepared)

    async def ask(self, *pieces: bytes | bytearray | memoryview) -> bytes:
        """Sends the pieces as one frame and returns the answer. If the child ends meanwhile, other than by its timer,
        the request is tried once more. Raises ChildEnded."""
        return await self._in_turn(lambda: self._asked(pieces))

    async def aclose(self) -> None:
        for task in self._at_work:
            task.cancel()
        await asyncio.gather(*self._at_work, return_exceptions=True)
        if self._starting is not None:
            with contextlib.suppress(OSError):
                self._process = await self._starting
        if self._process is not None:
            # The child may be in the middle of something.
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._status()

    async def _in_turn(self, work: Callable[[], Coroutine[None, None, bytes]]) -> bytes:
        """Does the work after all that was asked for before. A caller that is cancelled before its turn causes no
        work. Later the work goes on: otherwise the next caller would read the answer to this request."""
        await self._turn.acquire()
        task = asyncio.create_task(work())
        self._at_work.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    async def _prepared(self) -> bytes:
        await self._ready()
        return b""

    async def _asked(self, pieces: Sequence[bytes | bytearray | memoryview]) -> bytes:
        try:
            return await self._told(await self._ready(), pieces)
        except ChildEnded as ended:
            if ended.is_timed_out:
                raise
            # The child had just ended by itself, after its last answer, or was killed.
            return await self._told(await self._ready(), pieces)

    async def _ready(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._starting = self._starting or asyncio.create_task(start(self._module))
            try:
                process = await asyncio.shield(self._starting)
            except OSError as error:
                self._starting = None
                raise NotStarted(error.errno or 0) from error
            self._starting, self._process = None, process
            if self._greeting is not None:
                try:
                    await self._told(process, self._greeting())
                except ChildEnded as ended:
                    raise NotStarted(ended.status) from None
        return self._process

    async def _told(
        self, process: asyncio.subprocess.Process, pieces: Sequence[bytes | bytearray | memoryview]
    ) -> bytes:
        try:
            async with asyncio.timeout(self._patience_s):
                await tell(process, *pieces)
                return await hear(process)
        except TimeoutError:
            process.kill()
            await self._status()
            raise ChildEnded(-signal.SIGALRM) from None
        except ENDED:
            raise ChildEnded(await self._status()) from None

    async def _status(self) -> int:
        """Returns the status of the child, which has ended. (To kill it once more could take its status from the task
        which waits for it.)"""
        process, self._process = self._process, None
        return 0 if process is None else await process.wait()

    def _over(self, task: asyncio.Task[bytes]) -> None:
        self._at_work.discard(task)
        self._turn.release()
        if not task.cancelled():
            # The caller sees the exception, if it still waits; here it only must not be reported as unseen.
            task.exception()


async def start(
    module: str, environment: Mapping[str, str] = MappingProxyType({})
) -> asyncio.subprocess.Process:
    """Starts a child. Run this in a task of its own: a start that is cancelled midway may never end (in asyncio of
    Python 3.11). `environment` is added to this process's environment."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        # A ctrl-C in the terminal must not reach it: it ends when its stdin does.
        start_new_session=True,
    )


async def tell(process: asyncio.subprocess.Process, *pieces: bytes | bytearray | memoryview) -> None:
    """Sends the pieces as one frame. They are not joined first: to copy megabytes would hold up the event loop for too
    long."""
    assert process.stdin
    process.stdin.write(sum(map(len, pieces)).to_bytes(_LENGTH_BYTES, "big"))
    for piece in pieces:
        for start in range(0, len(piece), _STEP_BYTES):
            process.stdin.write(memoryview(piece)[start : start + _STEP_BYTES])
            await process.stdin.drain()


async def hear(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout
    length = int.from_bytes(await process.stdout.readexactly(_LENGTH_BYTES), "big")
    return await process.stdout.readexactly(length)


# ---- the child's side ----


def read_frame(source: BinaryIO) -> bytes | None:
    """Returns the content of the next frame; None at the end. `source` may be unbuffered."""
    size = _read(source, _LENGTH_BYTES)
    return _read(source, int.from_bytes(size, "big")) if size else None


def frame(content: bytes) -> bytes:
    return len(content).to_bytes(_LENGTH_BYTES, "big") + content


def write_frame(answers: BinaryIO, content: bytes) -> None:
    answers.write(frame(content))
    answers.flush()


def _read(source: BinaryIO, size: int) -> bytes:
    found = bytearray()
    while len(found) < size and (more := source.read(size - len(found))):
        found += more
    return bytes(found)
