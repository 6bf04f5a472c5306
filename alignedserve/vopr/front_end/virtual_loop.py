"""An asyncio event loop on virtual time: nothing waits, and nothing is random.

Ready callbacks run in the order in which they were scheduled. When none is left, the clock makes its next step
(alignedserve/sim/clock.py). Timers of the loop are events of that clock like any other, so timers of the same time run
in the order in which they were set. There are no threads and no files: work for a thread runs at once. Tasks and
futures are hashed by number, so that sets of them have the same order in each run.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, TypeVar, cast

from alignedserve.sim.clock import Clock, SimTimer
from alignedserve.vopr.front_end.journal import Journal
from alignedserve.vopr.front_end.virtual_network import VirtualNetwork
from alignedserve.vopr.front_end.virtual_process import VirtualProcess, current_process, process_of

Result = TypeVar("Result")

# Seconds of virtual time that tasks get to end when they are cancelled at the end of a run.
ENDING_S = 60.0
# Rounds of callbacks without passing time after which a run counts as endless. Seeds took at most 20.
MAX_ROUNDS = 20_000


class Deadlock(RuntimeError):
    """Nothing is left to happen, and the main task still waits."""


class Livelock(RuntimeError):
    """Callbacks make each other ready, and no time passes."""


class VirtualLoop(asyncio.BaseEventLoop):
    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self, clock: Clock | None = None, journal: Journal | None = None) -> None:
        super().__init__()
        self.clock = clock or Clock()
        self.journal = journal or Journal(self.clock)
        self.network = VirtualNetwork(self, self.clock, self.journal)
        # Errors of callbacks that were never awaited.
        self.errors: list[dict[str, Any]] = []
        self._num_made = 0
        # The rounds of callbacks since the clock's last step.
        self._num_rounds = 0
        self._processes: list[VirtualProcess] = []
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def new_process(self, name: str) -> VirtualProcess:
        self._processes.append(VirtualProcess(self, name))
        return self._processes[-1]

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        """Runs the main task to its end, cancels all others and closes the loop. Raises Deadlock."""
        try:
            return self.run_until_complete(main)
        finally:
            # Anything that tasks of killed processes still do is not part of the run.
            self.set_exception_handler(lambda _, context: None)
            for process in self._processes:
                process.bury()
            self.run_until_complete(self._cancel_all())
            self.run_until_complete(self.shutdown_asyncgens())
            self.close()

    def run_late(self, handles: list[asyncio.Handle]) -> None:
        """Runs callbacks that were ready before and had to wait."""
        self._ready.extend(handles)

    # ---- time ----

    def time(self) -> float:
        return self.clock.now

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = _TimerHandle(when, callback, args, self, context)
        handle.timer = self.clock.at(max(when, self.clock.now), functools.partial(self._due, handle))
        return handle

    def _due(self, handle: asyncio.Handle) -> None:
        self._ready.append(handle)

    def _run_once(self) -> None:
        self._num_rounds += 1
        if self._num_rounds > MAX_ROUNDS:
            self._num_rounds = 0
            raise Livelock(f"{len(self._ready)} callbacks are ready again and again, and no time passes")
        while not self._ready:
            self._num_rounds = 0
            if not self.clock.step():
                raise Deadlock(f"nothing is left to happen, but these wait: {self._waiting()}")
        for _ in range(len(self._ready)):
            handle = cast(Any, self._ready.popleft())
            if handle.cancelled():
                continue
            process = process_of(handle._context)
            if process is None or process.admits(handle):
                handle._run()

    def _waiting(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        return "; ".join(_description(task) for task in tasks)

    # ---- tasks ----

    def create_task(
        self,
        coro: Generator[Any, None, Result] | Coroutine[Any, Any, Result],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Result]:
        return _Task[Result](coro, loop=self, name=str(name or f"task {self._num_made}"), context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def next_number(self) -> int:
        self._num_made += 1
        return self._num_made

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks(self) - {asyncio.current_task(self)}
        for task in sorted(others, key=hash):
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=ENDING_S)

    # ---- no threads ----

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    # ---- signals ----

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., object], *args: Any
    ) -> None:
        """Sets the handler for the calling process."""
        if process := current_process():
            process.on_signal(sig, functools.partial(callback, *args))

    # ---- connections ----

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], host: str, port: int, **_: Any
    ) -> Any:
        return self.network.listen(protocol_factory, host, port)

    async def create_unix_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], path: str, **_: Any
    ) -> Any:
        return self.network.listen(protocol_factory, path, 0)

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], host: str, port: int, **_: Any
    ) -> Any:
        return await self.network.connect(protocol_factory, host, port)

    async def create_unix_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], path: str, **_: Any
    ) -> Any:
        return await self.network.connect(protocol_factory, path, 0)


class _Task(asyncio.Task[Result]):
    def __init__(self, coro: Any, *, loop: VirtualLoop, **options: Any) -> None:
        # Set before the task exists, because creating a task puts it into sets.
        self._number = loop.next_number()
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[Any]):
    def __init__(self, *, loop: VirtualLoop) -> None:
        self._number = loop.next_number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class _TimerHandle(asyncio.TimerHandle):
    timer: SimTimer

    def cancel(self) -> None:
        super().cancel()
        self.timer.cancel()


def _description(task: asyncio.Task[Any]) -> str:
    frames: Iterable[Any] = task.get_stack(limit=1)
    places = [f"{frame.f_code.co_qualname}, line {frame.f_lineno}" for frame in frames]
    return f"{task.get_name()} (in {', '.join(places) or 'no frame'})"
