"""A worker's loop, live and in virtual time, and its thread beside the event loop that carries messages.

Events (orders, new and lost connections) wait in an inbox and are handled between two iterations. The worker never
waits for the router. When it has nothing to compute, it sleeps until an order or the end of a copy wakes it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from alignedserve.instance.adapters import AdapterLoader
from alignedserve.instance.worker import Worker
from alignedserve.protocol.connection import RouterConnection
from alignedserve.protocol.messages import AnyMessage, Hello, SetAdapters, TakeRole, UsePool, Welcome

# Seconds between checks of an idle worker that its engine is intact.
LOOK_S = 1.0


class Segment(Protocol):
    """The pool's memory as mapped by this process."""

    @property
    def blocks(self) -> Any:
        """Its memory, as `Worker.use_pool` takes it."""

    @property
    def checksums(self) -> Any:
        """Those of its blocks."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Up:
    """A new connection to a router. Its number prevents messages for one connection from being sent on another."""

    connection: int


@dataclass(frozen=True)
class Down:
    """The connection is lost, and all of its orders are void."""

    # Called on the worker's thread when everything is dropped and no copy is running.
    dropped: Callable[[], object] = lambda: None


class Stop:
    pass


class WorkerLoop:
    """An instance's worker with its inbox. Live, a thread repeats `begin` and `finish` (`WorkerThread`), in virtual
    time a clock does (`sim/instance.py`)."""

    def __init__(
        self,
        worker: Worker,
        attach: Callable[[str], Segment],
        say: Callable[[int, list[AnyMessage]], None],
        take_role: Callable[[str], tuple[Worker, Hello]] | None = None,
        is_over: Callable[[], bool] = lambda: False,
        adapters: AdapterLoader | None = None,
    ) -> None:
        """`attach` maps the pool's segment. `say` sends messages on the connection with this number. `take_role` makes
        the worker of another role and its Hello to the router. `is_over` returns whether the router has ended the
        connection. `adapters` loads adapters; None: all are there from the start."""
        self.worker = worker
        self.is_stopped = False
        self._attach = attach
        self._say = say
        self._make_role = take_role
        self._is_over = is_over
        self._adapters = adapters
        self._inbox: queue.SimpleQueue[AnyMessage | Up | Down | Stop] = queue.SimpleQueue()
        self._connection = 0
        # Whether messages of the connection are void, although Down has not arrived yet.
        self._is_void = False
        self._segment: Segment | None = None

    def post(self, item: AnyMessage | Up | Down | Stop) -> None:
        """Adds to the inbox. Any thread may call this."""
        self._inbox.put(item)

    def begin(self) -> Any:
        """Takes the inbox, and does the first half of an iteration. Returns its step; None after Stop."""
        # What arrives from here on waits for the next iteration.
        for _ in range(self._inbox.qsize()):
            self._take(self._inbox.get())
        if self.is_stopped:
            return None
        if self._adapters:
            self._send(self._adapters.go_on())
        self._send(self.worker.take_outcomes())
        return self.worker.begin()

    def finish(self, step: Any) -> bool:
        """Does the second half. Returns whether to continue immediately or after a wake."""
        messages, goes_on = self.worker.finish(step)
        self._send(messages)
        return goes_on

    def _send(self, messages: list[AnyMessage]) -> None:
        if messages:
            # The copies may involve data that was computed while a rank was lost.
            self.worker.engine.confirm()
            self._say(self._connection, messages)

    def _take(self, item: AnyMessage | Up | Down | Stop) -> None:
        match item:
            case Up(connection):
                self.worker.drop_all()
                if self.worker.transfers.checks_some_blocks:
                    # A wrong block may have been found meanwhile.
                    self.worker.prompts.distrust_all(era=0)
                self._connection, self._is_void = connection, False
                if self._adapters:
                    self._adapters.connected()
            case Down(dropped):
                self.worker.drop_all()
                dropped()
            case Stop():
                self.worker.drop_all()
                self._leave_pool()
                self.worker.close()
                if self._adapters:
                    self._adapters.close()
                self.is_stopped = True
            case _ if self._is_void:
                pass
            case TakeRole(role):
                self._take_role(role)
            case SetAdapters() if self._adapters:
                self._send(self._adapters.take(item))
            case UsePool(segment):
                self._use_pool(segment)
            case order:
                self.worker.on(order)

    def _take_role(self, role: str) -> None:
        if self._make_role is None:
            raise RuntimeError(f"is to be a {role} instance, and can be nothing else than it is")
        self.worker.drop_all()
        self.worker.check_idle()
        self._leave_pool()
        self.worker.close()
        self.worker, hello = self._make_role(role)
        if self._adapters:
            # To the router, another process connects. It sends the order again.
            self._adapters.connected()
        self._send([hello])

    def _use_pool(self, segment: str) -> None:
        """Maps the pool. The router checks which processes have mapped the segment only after it has ended their
        connections. So either it finds this process, or this process notices the end of the connection here."""
        self._leave_pool()
        self._segment = self._attach(segment)
        self._is_void = self._is_over()
        if self._is_void:
            self._leave_pool()
        else:
            self.worker.use_pool(self._segment.blocks, self._segment.checksums)

    def _leave_pool(self) -> None:
        self.worker.leave_pool()
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class Messenger:
    """Passes messages between the connection to the router and the worker's loop, which live have a thread each."""

    def __init__(
        self,
        post: Callable[[AnyMessage | Up | Down], None],
        call: Callable[[Callable[[], object]], object],
        link: Callable[[], RouterConnection],
    ) -> None:
        """`post` adds to the worker's inbox and wakes the worker. `call` calls an action on the connection's thread.
        `link` returns the connection."""
        self._post = post
        self._call = call
        self._link = link
        # Counts connections, and the times without one. Messages for an earlier number are lost.
        self._connection = 0

    # ---- on the connection's thread ----------------------------------------------------------------------------------

    def on_up(self, welcome: Welcome) -> None:
        self._connection += 1
        self._post(Up(self._connection))

    def on_message(self, message: AnyMessage) -> None:
        # A Welcome here answers a repeated Hello on the same connection.
        if not isinstance(message, Welcome):
            self._post(message)

    def on_down(self) -> None:
        self._connection += 1
        # A router that receives Hello relies on it that no state of an earlier connection is left.
        self._post(Down(partial(self._call, self._link().resume)))

    def _send(self, connection: int, messages: list[AnyMessage]) -> None:
        if connection == self._connection:
            for message in messages:
                self._link().send(message)

    # ---- on the worker's thread --------------------------------------------------------------------------------------

    def say(self, connection: int, messages: list[AnyMessage]) -> None:
        self._call(partial(self._send, connection, messages))


class WorkerThread:
    """Repeats a worker's iterations, and sleeps while there is nothing to compute."""

    def __init__(
        self,
        loop: WorkerLoop,
        wake: threading.Event,
        failed: Callable[[], object],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """`wake` is the event that the worker sets. `begin`, first, and `failed` are called on this thread."""
        self.error: BaseException | None = None
        self._loop = loop
        self._wake = wake
        self._failed = failed
        self._begin = begin
        self._thread = threading.Thread(target=self._run, name="worker")

    def start(self) -> None:
        self._thread.start()

    def post(self, item: AnyMessage | Up | Down | Stop) -> None:
        """Adds to the worker's inbox. Any thread may call this."""
        self._loop.post(item)
        self._wake.set()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._begin()
            self._iterate()
        except BaseException as error:
            self.error = error
            self._failed()

    def _iterate(self) -> None:
        goes_on = False
        while True:
            if not goes_on:
                self._rest()
            self._wake.clear()
            step = self._loop.begin()
            if self._loop.is_stopped:
                return
            goes_on = self._loop.finish(step)

    def _rest(self) -> None:
        """Sleeps until there is something to do. If a rank is lost meanwhile, this instance ends before it gets a
        request that it could not compute."""
        worker = self._loop.worker
        while not self._wake.wait(worker.patience_s or LOOK_S):
            worker.engine.confirm()
            if worker.patience_s:
                return
