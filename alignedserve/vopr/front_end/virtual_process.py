"""The processes that share a virtual event loop. Each can hang, wake up late, and be killed, without the others.

A process owns everything that runs in its context: its tasks, the callbacks that they schedule, and data that arrives
on its connections. A hanging process runs none of it until it wakes up, and then runs everything that has gathered, in
order. A killed process runs nothing more, not even a `finally`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")

_current: contextvars.ContextVar[VirtualProcess] = contextvars.ContextVar("virtual process")


class Loop(Protocol):
    """The interface of a process's event loop (virtual_loop.py)."""

    def create_task(
        self, coro: Coroutine[Any, Any, Result], *, name: str, context: contextvars.Context
    ) -> asyncio.Task[Result]: ...

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle: ...

    def run_late(self, handles: list[asyncio.Handle]) -> None: ...


class VirtualProcess:
    def __init__(self, loop: Loop, name: str) -> None:
        self.name = name
        # Seconds by which this process's wall clock is ahead of the true time. It may jump.
        self.wall_ahead_s = 0.0
        self.is_killed = False
        self.context = contextvars.copy_context()
        self.context.run(_current.set, self)
        self._loop = loop
        # Callbacks that arrived while the process hung, or after it was killed; None: it runs.
        self._held: list[asyncio.Handle] | None = None
        self._handlers: dict[int, Callable[[], object]] = {}
        # Called when the process is killed, in this order. The keys serve to remove an entry.
        self._on_kill: dict[object, Callable[[], None]] = {}

    def start(self, main: Coroutine[Any, Any, Result], name: str = "main") -> asyncio.Task[Result]:
        """Starts a task of this process."""
        return watched(self._loop.create_task(main, name=f"{self.name}: {name}", context=self.context.copy()))

    @property
    def is_hung(self) -> bool:
        return self._held is not None and not self.is_killed

    def hang(self) -> None:
        if self._held is None:
            self._held = []

    def wake_up(self) -> None:
        """Runs everything that has gathered. Does nothing for a killed process."""
        if not self.is_killed:
            self.bury()

    def bury(self) -> None:
        """Lets the tasks end at the end of a run. A task with a step that never runs could not even be cancelled."""
        held, self._held = self._held or [], None
        self._loop.run_late(held)

    def kill(self) -> None:
        """Kills the process. Nothing of it runs any more, and the kernel closes its connections. Safe to repeat."""
        if not self.is_killed:
            self.is_killed = True
            self._held = self._held or []
            for close in list(self._on_kill.values()):
                close()

    def on_signal(self, signal: int, handler: Callable[[], object]) -> None:
        self._handlers[signal] = handler

    def send_signal(self, signal: int) -> None:
        """Calls the process's handler, or kills the process if it has none."""
        if handler := self._handlers.get(signal):
            self._loop.call_soon(handler, context=self.context)
        else:
            self.kill()

    def on_kill(self, key: object, close: Callable[[], None]) -> None:
        self._on_kill[key] = close

    def forget(self, key: object) -> None:
        self._on_kill.pop(key, None)

    def admits(self, handle: asyncio.Handle) -> bool:
        """Returns whether the callback may run now. Otherwise the process keeps it."""
        if self._held is not None:
            self._held.append(handle)
        return self._held is None


class Lives:
    """A process that can be killed and started again. Each life is a virtual process of its own."""

    # Its latest life.
    process: VirtualProcess | None = None

    @property
    def is_up(self) -> bool:
        """Whether it runs, or hangs."""
        return self.process is not None and not self.process.is_killed

    @property
    def is_hung(self) -> bool:
        return self.process is not None and self.process.is_hung

    def kill(self) -> None:
        if self.process:
            self.process.kill()

    def hang(self) -> None:
        if self.process:
            self.process.hang()

    def wake_up(self) -> None:
        if self.process:
            self.process.wake_up()


def watched(task: asyncio.Task[Result]) -> asyncio.Task[Result]:
    """Makes an error that ends the task an error of the run. Returns the task."""

    def over(task: asyncio.Task[Result]) -> None:
        if not task.cancelled() and (error := task.exception()):
            context = {"message": f"{task.get_name()} failed", "exception": error}
            task.get_loop().call_exception_handler(context)

    task.add_done_callback(over)
    return task


def current_process() -> VirtualProcess | None:
    """Returns the process that runs now; None: the driver."""
    return _current.get(None)


def process_of(context: contextvars.Context) -> VirtualProcess | None:
    return context.get(_current)
