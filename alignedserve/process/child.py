"""A child process that works for this one. Unlike a thread, it can be stopped while it works.

Requests and answers are frames: four bytes of length, then the content. The child exits when its stdin is closed. If a
signal ends it, of its own timer or of the kernel, the caller gets an error.

A `Starter` starts children, and can start the next one in advance. `Child` makes one request at a time. Children that
work on several at once are taken from their `Starter`, and asked with `tell` and `hear`.
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
# Capacity of a pipe.
_STEP_BYTES = 64 << 10


# Exceptions that mean that the child has exited.
ENDED = (asyncio.IncompleteReadError, ConnectionError)


class ChildEnded(Exception):
    """The child exited while it worked on a request; twice, unless its own timer ended it."""

    def __init__(self, status: int, is_hung: bool = False) -> None:
        """`status` is its exit status, or minus the number of the signal that ended it. `is_hung`: it did not answer in
        time and was killed here."""
        super().__init__(f"it ended with status {status}")
        self.status = status
        self.is_hung = is_hung

    @property
    def is_timed_out(self) -> bool:
        """Whether its time was up, by its own timer or by the timeout here."""
        return self.is_hung or self.status in (-signal.SIGALRM, -signal.SIGPROF)


class NotStarted(ChildEnded):
    """The child exited before it answered its greeting, or could not be started."""

    def __init__(self, status: int, is_hung: bool = False, error: OSError | None = None) -> None:
        """`error`: why it could not be started."""
        super().__init__(status, is_hung)
        self.error = error


class Starter:
    """Starts children. It can keep a spare, so that the next caller need not wait for a start."""

    def __init__(
        self,
        module: str,
        greeting: Callable[[], Sequence[bytes]] | None = None,
        patience_s: float = 60.0,
        keeps_spare: bool = False,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`module` is the children's program. A child first receives the pieces of `greeting`, if there is one, and
        answers with an empty frame. A child that takes longer than `patience_s` seconds is killed. With `keeps_spare`,
        the next child is started as soon as one is taken. `environment` is added to this process's environment."""
        self._module = module
        self._greeting = greeting
        self._patience_s = patience_s
        self._keeps_spare = keeps_spare
        self._environment = environment
        self._spare: asyncio.Task[asyncio.subprocess.Process] | None = None
        # Started children that have not been taken yet, including the spare.
        self._untaken: set[asyncio.Task[asyncio.subprocess.Process]] = set()
        # Children that have not answered their greeting yet.
        self._greeted: set[asyncio.subprocess.Process] = set()
        self._is_closed = False

    async def take(self) -> asyncio.subprocess.Process:
        """Returns a child that has answered its greeting. It then belongs to the caller. Raises NotStarted."""
        if self._is_closed:
            raise NotStarted(0)
        found, self._spare = self._spare, None
        if found is not None and _is_over(found):
            self._untaken.discard(found)
            found = None
        if found is None:
            found = self._begin()
        if self._keeps_spare:
            # The spare starts after this child, so as not to slow it.
            found.add_done_callback(self._keep_spare)
        # If a start is cancelled midway, it may never end.
        process = await asyncio.shield(found)
        self._untaken.discard(found)
        return process

    async def aclose(self) -> None:
        """Ends all children that were not taken. Safe to repeat."""
        self._is_closed, self._spare = True, None
        for process in self._greeted:
            _kill(process)
        while self._untaken:
            with contextlib.suppress(NotStarted):
                process = await self._untaken.pop()
                _kill(process)
                await process.wait()

    def _begin(self) -> asyncio.Task[asyncio.subprocess.Process]:
        task = asyncio.create_task(self._started())
        self._untaken.add(task)
        task.add_done_callback(self._note)
        return task

    def _note(self, task: asyncio.Task[asyncio.subprocess.Process]) -> None:
        # A waiting caller gets the exception. The next one that needs a spare starts another.
        if task.cancelled() or task.exception() is not None:
            self._untaken.discard(task)

    def _keep_spare(self, taken: asyncio.Task[asyncio.subprocess.Process]) -> None:
        failed = taken.cancelled() or taken.exception() is not None
        if self._spare is None and not failed and not self._is_closed:
            self._spare = self._begin()

    async def _started(self) -> asyncio.subprocess.Process:
        try:
            process = await _start(self._module, self._environment)
        except OSError as error:
            raise NotStarted(error.errno or 0, error=error) from error
        if self._greeting is not None:
            await self._greet(process, self._greeting())
        return process

    async def _greet(
        self, process: asyncio.subprocess.Process, pieces: Sequence[bytes | bytearray | memoryview]
    ) -> None:
        self._greeted.add(process)
        if self._is_closed:
            _kill(process)
        try:
            await _exchanged(process, self._patience_s, pieces)
        except ChildEnded as ended:
            raise NotStarted(ended.status, ended.is_hung) from None
        finally:
            self._greeted.discard(process)


def _is_over(start: asyncio.Task[asyncio.subprocess.Process]) -> bool:
    """Whether the start failed or its process has exited since."""
    if not start.done():
        return False
    return start.cancelled() or start.exception() is not None or start.result().returncode is not None


class Child:
    """A child process that starts when it is first needed, and again after it has exited."""

    def __init__(self, starter: Starter, patience_s: float) -> None:
        """Closing one of several children with the same starter closes all of them. A child is killed as hung if it
        does not answer for `patience_s` seconds, which must be longer than its own timer."""
        self._starter = starter
        self._patience_s = patience_s
        self._process: asyncio.subprocess.Process | None = None
        # At most one request at a time.
        self._turn = asyncio.Lock()
        self._at_work: set[asyncio.Task[bytes]] = set()

    async def prepare(self) -> None:
        """Starts the child, so that the first request does not wait for it. Raises ChildEnded."""
        await self._in_turn(self._prepared)

    async def ask(self, *pieces: bytes | bytearray | memoryview) -> bytes:
        """Sends the pieces as one frame and returns the answer. If the child exits meanwhile, other than by its timer,
        the request is retried once. Raises ChildEnded."""
        return await self._in_turn(lambda: self._asked(pieces))

    async def aclose(self) -> None:
        for task in self._at_work:
            task.cancel()
        await asyncio.gather(*self._at_work, return_exceptions=True)
        if self._process is not None:
            # The child may be working.
            _kill(self._process)
            await self._process.wait()
            self._process = None
        await self._starter.aclose()

    async def _in_turn(self, work: Callable[[], Coroutine[None, None, bytes]]) -> bytes:
        """Does the work after all earlier calls. If the caller is cancelled before its turn, no work is done. After
        that, the work goes on: otherwise the next caller would read the answer to this request."""
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
            # The child exited on its own just after its last answer, or was killed.
            return await self._told(await self._ready(), pieces)

    async def _ready(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._process = await self._starter.take()
        return self._process

    async def _told(
        self, process: asyncio.subprocess.Process, pieces: Sequence[bytes | bytearray | memoryview]
    ) -> bytes:
        try:
            return await _exchanged(process, self._patience_s, pieces)
        except ChildEnded:
            self._process = None
            raise

    def _over(self, task: asyncio.Task[bytes]) -> None:
        self._at_work.discard(task)
        self._turn.release()
        if not task.cancelled():
            # A waiting caller sees the exception. This marks it as retrieved.
            task.exception()


async def _exchanged(
    process: asyncio.subprocess.Process,
    patience_s: float,
    pieces: Sequence[bytes | bytearray | memoryview],
) -> bytes:
    """Sends the pieces as one frame and returns the answer. Raises ChildEnded."""
    try:
        async with asyncio.timeout(patience_s):
            await tell(process, *pieces)
            return await hear(process)
    except TimeoutError:
        _kill(process)
        await process.wait()
        raise ChildEnded(-signal.SIGALRM, is_hung=True) from None
    except ENDED:
        raise ChildEnded(await process.wait()) from None


def _kill(process: asyncio.subprocess.Process) -> None:
    # It may just have exited on its own.
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _start(module: str, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Starts a child. Run this in its own task: a start that is cancelled midway may never end (asyncio in Python
    3.11)."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        # A ctrl-C in the terminal must not reach the child, which exits when its stdin is closed. It stays in this
        # session. Linux schedules each session as a group (`sched_autogroup`), and one that works for a millisecond at
        # a time waited up to 145 ms for a busy core.
        process_group=0,
    )


async def tell(process: asyncio.subprocess.Process, *pieces: bytes | bytearray | memoryview) -> None:
    """Sends the pieces as one frame. They are not joined first, because copying megabytes blocks the event loop too
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
