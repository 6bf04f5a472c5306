"""An instance's messages between its connection to the router and its worker, which have a thread each."""

from __future__ import annotations

import asyncio

from alignedserve.instance.loop import Down, Up, WorkerThread
from alignedserve.protocol.connection import RouterConnection
from alignedserve.protocol.messages import AnyMessage, Welcome
from alignedserve.protocol.signals import stop_on_sigterm


class Messenger:
    """Passes messages between the connection on the event loop's thread and the worker's thread."""

    link: RouterConnection

    def __init__(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._num_connections = 0

    def start(self, thread: WorkerThread, link: RouterConnection) -> None:
        self._thread, self.link = thread, link
        stop_on_sigterm(link.stop)
        thread.start()

    # ---- on the event loop's thread, for the connection --------------------------------------------------------------

    def on_up(self, welcome: Welcome) -> None:
        self._num_connections += 1
        self._thread.post(Up(self._num_connections))

    def on_message(self, message: AnyMessage) -> None:
        # A Welcome here answers a repeated Hello on the same connection.
        if not isinstance(message, Welcome):
            self._thread.post(message)

    def on_down(self) -> None:
        # A router that receives Hello relies on it that no state of an earlier connection is left.
        self._thread.post(Down(self._have_dropped))

    def _send(self, connection: int, messages: list[AnyMessage]) -> None:
        if connection == self._num_connections:
            for message in messages:
                self.link.send(message)

    # ---- on the worker's thread --------------------------------------------------------------------------------------

    def say(self, connection: int, messages: list[AnyMessage]) -> None:
        self._event_loop.call_soon_threadsafe(self._send, connection, messages)

    def _have_dropped(self) -> None:
        self._event_loop.call_soon_threadsafe(self.link.resume)

    def stop_soon(self) -> None:
        self._event_loop.call_soon_threadsafe(self.link.stop)
