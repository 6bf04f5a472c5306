"""The thread that a worker runs on, beside the event loop that carries messages.

Events from elsewhere (orders, a connection that comes or goes) wait in an inbox and are taken between two iterations.
The worker never waits for the router; with nothing to compute it sleeps until an order or the end of a copy wakes it.
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

# Seconds after which a worker that has nothing to do looks whether its engine is still whole.
LOOK_S = 1.0


class Segment(Protocol):
    """The pool's memory, as this process maps it."""

    @property
    def blocks(self) -> NDArray[np.uint8]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Up:
    """A connection to a router. It has a number, so that messages meant for one connection are never sent on
    another."""

    connection: int


@dataclass(frozen=True)
class Down:
    """The connection is gone, and all that was ordered is void."""

    # It is called on the worker's thread when everything is dropped: no copy is under way any more.
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

        `wake` is the event that the worker sets. `begin`, first of all, and then `say` and `failed` are called on
        this thread, and `take_role`, which makes the worker of another role, and what that says to the router."""
        self._make_role = take_role
        self._worker = worker
        self._wake = wake
        self._attach = attach
        self._say = say
        self._failed = failed
        self._begin = begin
        self._inbox: queue.SimpleQueue[AnyMessage | Up | Down | Stop] = queue.SimpleQueue()
        self._connection = 0
        # Whether what the connection brings is void, though Down has not come yet.
        self._is_void = False
        self._is_over = is_over
        self._segment: Segment | None = None
        self._is_stopped = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="worker")

    def start(self) -> None:
        self._thread.start()

    def post(self, item: AnyMessage | Up | Down | Stop) -> None:
        """Adds to the inbox; may be called from any thread."""
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
        """Sleeps until there is something to do. A rank that is lost meanwhile ends this instance, before a request
        comes that would have to wait for another one."""
        while not self._wake.wait(self._worker.patience_s or LOOK_S):
            self._worker.engine.confirm()
            if self._worker.patience_s:
                return

    def _send(self, messages: list[AnyMessage]) -> None:
        if messages:
            # Copies may have moved what was computed while a rank was lost.
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
        """The router checks which processes have the segment mapped after it has ended their connections. So it either
        finds this process, or the end of the connection is found here."""
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
