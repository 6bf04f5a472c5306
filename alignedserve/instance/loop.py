"""The worker's thread, beside the event loop that carries messages.

Events (orders, new and lost connections) wait in an inbox and are handled between two iterations. The worker never
waits for the router. When it has nothing to compute, it sleeps until an order or the end of a copy wakes it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from alignedserve.instance.worker import Worker
from alignedserve.protocol.messages import AnyMessage, Hello, TakeRole, UsePool

# Seconds between checks of an idle worker that its engine is intact.
LOOK_S = 1.0


class Segment(Protocol):
    """The pool's memory as mapped by this process."""

    @property
    def blocks(self) -> NDArray[np.uint8]: ...

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
    def __init__(
        self,
        worker: Worker[Any],
        wake: threading.Event,
        attach: Callable[[str], Segment],
        say: Callable[[int, list[AnyMessage]], None],
        failed: Callable[[], None],
        begin: Callable[[], None] = lambda: None,
        take_role: Callable[[str], tuple[Worker[Any], Hello]] | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_over` returns whether the router has ended the connection.

        `wake` is the event that the worker sets. The following are called on this thread: `begin`, first; `say` and
        `failed`; and `take_role`, which makes the worker of another role and its Hello to the router.
        """
        self._make_role = take_role
        self._worker = worker
        self._wake = wake
        self._attach = attach
        self._say = say
        self._failed = failed
        self._begin = begin
        self._inbox: queue.SimpleQueue[AnyMessage | Up | Down | Stop] = queue.SimpleQueue()
        self._connection = 0
        # Whether messages of the connection are void, although Down has not arrived yet.
        self._is_void = False
        self._is_over = is_over
        self._segment: Segment | None = None
        self._is_stopped = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="worker")

    def start(self) -> None:
        self._thread.start()

    def post(self, item: AnyMessage | Up | Down | Stop) -> None:
        """Adds to the inbox. Any thread may call this."""
        self._inbox.put(item)
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
            self._take_inbox()
            if self._is_stopped:
                return
            self._send(self._worker.take_outcomes())
            messages, goes_on = self._worker.finish(self._worker.begin())
            self._send(messages)

    def _rest(self) -> None:
        """Sleeps until there is something to do. If a rank is lost meanwhile, this instance ends before it gets a
        request that it could not compute."""
        while not self._wake.wait(self._worker.patience_s or LOOK_S):
            self._worker.engine.confirm()
            if self._worker.patience_s:
                return

    def _send(self, messages: list[AnyMessage]) -> None:
        if messages:
            # The copies may involve data that was computed while a rank was lost.
            self._worker.engine.confirm()
            self._say(self._connection, messages)

    def _take_inbox(self) -> None:
        while not self._inbox.empty():
            match self._inbox.get():
                case Up(connection):
                    self._worker.drop_all()
                    self._connection, self._is_void = connection, False
                case Down(dropped):
                    self._worker.drop_all()
                    dropped()
                case Stop():
                    self._worker.drop_all()
                    self._leave_pool()
                    self._worker.close()
                    self._is_stopped = True
                case _ if self._is_void:
                    pass
                case TakeRole(role):
                    self._take_role(role)
                case UsePool(segment):
                    self._use_pool(segment)
                case order:
                    self._worker.on(order)

    def _take_role(self, role: str) -> None:
        if self._make_role is None:
            raise RuntimeError(f"is to be a {role} instance, and can be nothing else than it is")
        self._worker.drop_all()
        self._worker.check_idle()
        self._leave_pool()
        self._worker.close()
        self._worker, hello = self._make_role(role)
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
            self._worker.use_pool(self._segment.blocks)

    def _leave_pool(self) -> None:
        self._worker.leave_pool()
        if self._segment is not None:
            self._segment.close()
            self._segment = None
