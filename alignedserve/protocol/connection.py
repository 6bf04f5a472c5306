"""A process's connection to the router. It is opened again whenever it is lost.

The router may die and come back at the same address. When a connection is up, `on_up` is called with the router's
Welcome, which holds the router's epoch and so shows whether it is the same router. `on_message` is then called with
each message, and `on_down` when the connection is gone. Messages sent while it is down are lost: orders and reports of
a dead connection are worthless.

If another program listens at that address, the handshake fails. The connection is closed and the address tried again.
That program does not learn which process has connected, and nothing that it sends is acted upon.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.host import ClientHost, Link, LiveHost, Timer
from alignedserve.protocol.messages import AnyMessage, Hello, Message, Ping, Pong, Refused, Stop, Welcome
from alignedserve.types import Epoch

logger = logging.getLogger(__name__)

# Pings that a router sends within the time after which it counts as hanging.
NUM_PINGS = 5

# An epoch always has 16 digits, so names that end in one sort by age.
_FIRST_EPOCH = 10**15
_FIRST_RETRY_S = 0.05
_MAX_RETRY_S = 0.5
# Seconds after which a connection without a Welcome is closed: the listener may not be the router.
HANDSHAKE_TIMEOUT_S = 10.0


class RefusedByRouter(ValueError):
    """The router does not accept this process. Retrying would not help."""


class ConnectionHandler(Protocol):
    def on_up(self, welcome: Welcome) -> None: ...

    def on_message(self, message: AnyMessage) -> None: ...

    def on_down(self) -> None: ...


class RouterConnection:
    def __init__(
        self,
        address: RouterAddress,
        hello: Callable[[], Hello],
        handler: ConnectionHandler,
        waits: bool = False,
        host: ClientHost | None = None,
    ) -> None:
        """`hello` is called once per connection, because a pool's Hello lists what the pool holds at that moment.
        `waits`: after `on_down`, connects again only when `resume` is called."""
        self._address = address
        self._hello = hello
        self._handler = handler
        self._waits = waits
        self._host = host or LiveHost()
        self._link: Link | None = None
        self._is_up = False
        self._is_waiting = False
        self._is_stopped = False
        # Whether the router has sent Stop.
        self.was_told_to_stop = False
        self._retry_s = _FIRST_RETRY_S
        # The next attempt to connect. While connected: the next check of the router.
        self._timer: Timer | None = None
        # Seconds between two checks whether the router has sent anything, and the number of checks since it last had.
        self._watch_s = 0.0
        self._num_silent = 0
        # Set when `run` is over.
        self._ended: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    @property
    def is_up(self) -> bool:
        return self._is_up

    @property
    def is_over(self) -> bool:
        """Whether the router has closed the connection, even if this process has not processed that yet. Safe on any
        thread."""
        link = self._link
        return link is None or link.is_over

    def send(self, message: Message) -> None:
        """Sends the message. It is lost while there is no connection. Must be called in the event loop's thread."""
        if self._link:
            self._link.send(message)

    def stop(self) -> None:
        """Makes `run` return. Safe to repeat. Must be called in the event loop's thread."""
        self._is_stopped = True
        if self._ended and not self._ended.done():
            self._ended.set_result(None)

    async def run(self) -> None:
        """Runs until the router or `stop` ends it. Raises RefusedByRouter, and any error of the handler."""
        self._ended = asyncio.get_running_loop().create_future()
        try:
            if not self._is_stopped:
                self.begin()
                await self._ended
        finally:
            self._is_stopped = True
            self._cancel_timer()
        self._disconnect()
        if self._error:
            raise self._error

    def begin(self) -> None:
        """Connects, and again after each loss of the connection. `run` begins it too."""
        self._host.connect(self._address, self._hello, self)

    def resume(self) -> None:
        """Connects again, after `on_down`. Safe to repeat."""
        if self._is_waiting and not self._is_stopped:
            self._is_waiting = False
            self.begin()

    def repeat(self, seconds: float, action: Callable[[], object]) -> None:
        """Calls the action again and again, this many seconds apart, until `run` is over. That raises its error."""

        def act() -> None:
            if not self._is_stopped:
                self._try(action)
                self.repeat(seconds, action)

        self._host.after(seconds, act)

    # ---- callbacks of the host ----

    def opened(self, link: Link) -> None:
        if self._is_stopped:
            link.abort()
            return
        link.name = "the router"
        self._link = link
        self._timer = self._host.after(HANDSHAKE_TIMEOUT_S, self._end_without_welcome)

    def received(self, link: Link, message: AnyMessage) -> None:
        if link is not self._link or self._is_stopped:
            return
        self._num_silent = 0
        self._try(self._dispatch, message)

    def lost(self, link: Link | None) -> None:
        if link is not self._link or self._is_stopped:
            return
        self._cancel_timer()
        self._is_waiting = is_waiting = self._is_up and self._waits
        self._try(self._disconnect)
        if self._error:
            return
        if link is None or not link.is_proven:
            self._timer = self._host.after(self._retry_s, self.begin)
            self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)
        else:
            self._retry_s = _FIRST_RETRY_S
            if not is_waiting:
                self.begin()

    # ----

    def _dispatch(self, message: AnyMessage) -> None:
        match message:
            case Stop():
                self.was_told_to_stop = True
                self.stop()
            case Ping():
                self.send(Pong())
            case Refused(reason=reason):
                raise RefusedByRouter(reason)
            case Welcome() if not self._is_up:
                self._cancel_timer()
                self._is_up = True
                self._watch_s = message.silence_s / NUM_PINGS
                self._watch()
                self._handler.on_up(message)
            case _:
                self._handler.on_message(message)

    def _try(self, action: Callable[..., object], *args: AnyMessage) -> None:
        """Calls the action. Its error ends `run`, which raises it."""
        try:
            action(*args)
        except Exception as error:
            if self._ended is None:
                raise
            self._error = error
            self.stop()

    def _end_without_welcome(self) -> None:
        """Closes a connection on which no Welcome has arrived. It may have died silently, and silence is only detected
        after the Welcome."""
        if self._link and not self._is_up:
            logger.warning("no welcome from the router within %g s: connecting again", HANDSHAKE_TIMEOUT_S)
            self._link.abort()

    def _watch(self) -> None:
        """Checks whether the router has sent anything. Counts checks, not seconds: if this process itself has hung, the
        router's messages are still waiting to be read."""
        if not self._watch_s or not self._link:
            return
        if self._num_silent > NUM_PINGS:
            logger.warning(
                "The router hangs: it has sent nothing for %.0f s", self._num_silent * self._watch_s
            )
            self._link.abort()
            return
        self._num_silent += 1
        self._timer = self._host.after(self._watch_s, self._watch)

    def _cancel_timer(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _disconnect(self) -> None:
        self._num_silent = 0
        link, self._link = self._link, None
        if link:
            link.close()
        if self._is_up:
            self._is_up = False
            self._handler.on_down()


def new_epoch() -> Epoch:
    """Returns the epoch of this start of this process: microseconds since the host booted. A process is always
    restarted on the same host, so a later start has a greater epoch even if the clock was set back. A JSON number can
    hold it."""
    return Epoch(_FIRST_EPOCH + time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000)


def start_of(epoch: Epoch) -> float:
    """Returns when the process with this epoch was started: seconds since 1970, by the current wall clock."""
    return time.time() - (new_epoch() - epoch) / 1e6
