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
from collections.abc import Awaitable, Callable
from typing import Protocol

from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.frames import frame
from alignedserve.protocol.handshake import ClientHandshake
from alignedserve.protocol.messages import AnyMessage, Hello, Message, Ping, Pong, Refused, Stop, Welcome
from alignedserve.protocol.peer import Peer
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
        until_ready: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """`hello` is called once per connection, because a pool's Hello lists what the pool holds at that moment.
        `until_ready` is awaited before each connection."""
        self._until_ready = until_ready
        self._address = address
        self._hello = hello
        self._handler = handler
        self._peer: Peer | None = None
        self._is_up = False
        self._is_stopped = False
        # Whether the router has sent Stop.
        self.was_told_to_stop = False
        # Set when the connection, or the wait for the next one, is over.
        self._over = asyncio.Event()
        self._error: Exception | None = None
        # Seconds between two checks whether the router has sent anything, and the number of checks since it last had.
        self._watch_s = 0.0
        self._num_silent = 0
        self._watching: asyncio.TimerHandle | None = None

    @property
    def is_up(self) -> bool:
        return self._is_up

    @property
    def is_over(self) -> bool:
        """Whether the router has closed the connection, even if this process has not processed that yet. Safe on any
        thread."""
        peer = self._peer
        return peer is None or peer.is_over

    def send(self, message: Message) -> None:
        """Sends the message. It is lost while there is no connection. Must be called in the event loop's thread."""
        if self._peer:
            self._peer.send(message)

    def stop(self) -> None:
        """Makes `run` return. Safe to repeat. Must be called in the event loop's thread."""
        self._is_stopped = True
        self._over.set()

    async def run(self) -> None:
        """Runs until the router or `stop` ends it. Raises RefusedByRouter, and any error of the handler."""
        retry_s = _FIRST_RETRY_S
        while not self._is_stopped:
            if self._until_ready:
                await self._ready_or_over(self._until_ready())
                if self._is_stopped:
                    break
            if await self._connect() and await self._until_over():
                retry_s = _FIRST_RETRY_S
            else:
                await self._pause(retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)
            if self._error:
                raise self._error

        if self._error:
            raise self._error

    async def _ready_or_over(self, ready: Awaitable[object]) -> None:
        tasks = {asyncio.ensure_future(ready), asyncio.ensure_future(self._over.wait())}
        _, unfinished = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in unfinished:
            task.cancel()

    async def _connect(self) -> bool:
        try:
            transport, peer = await self._create_connection()
        except OSError:
            return False
        if transport.get_extra_info("sockname") == transport.get_extra_info("peername"):
            # TCP can connect a socket to itself, if its own port happens to be the one that it connects to.
            transport.abort()
            return False
        if not peer.is_open:
            return False
        peer.name = "the router"
        self._peer = peer
        asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self._end_without_welcome, peer)
        return True

    async def _create_connection(self) -> tuple[asyncio.Transport, Peer]:
        loop, address = asyncio.get_running_loop(), self._address
        if address.path is not None:
            return await loop.create_unix_connection(self._new_peer, address.path)
        return await loop.create_connection(self._new_peer, address.host, address.port)

    def _new_peer(self) -> Peer:
        handshake = ClientHandshake(self._address.token, lambda: frame(self._hello()))
        return Peer(handshake, self._message, self._closed)

    def _end_without_welcome(self, peer: Peer) -> None:
        """Closes a connection on which no Welcome has arrived. It may have died silently, and silence is only detected
        after the Welcome."""
        if peer is self._peer and not self._is_up:
            logger.warning("no welcome from the router within %g s: connecting again", HANDSHAKE_TIMEOUT_S)
            peer.abort()

    async def _until_over(self) -> bool:
        """Waits until the connection is over. Returns whether it was to the router."""
        await self._over.wait()
        was_routers = self._peer is not None and self._peer.is_proven
        self._disconnect()
        if not self._is_stopped:
            self._over.clear()
        return was_routers

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._over.wait(), seconds)
        except TimeoutError:
            return

    def _message(self, peer: Peer, message: AnyMessage) -> None:
        if peer is not self._peer or self._is_stopped:
            return
        self._num_silent = 0
        try:
            self._dispatch(message)
        except Exception as error:
            self._fail(error)

    def _dispatch(self, message: AnyMessage) -> None:
        match message:
            case Stop():
                self.was_told_to_stop = True
                self.stop()
            case Ping():
                self.send(Pong())
            case Refused(reason=reason):
                self._fail(RefusedByRouter(reason))
            case Welcome() if not self._is_up:
                self._is_up = True
                self._watch_s = message.silence_s / NUM_PINGS
                self._watch()
                self._handler.on_up(message)
            case _:
                self._handler.on_message(message)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self.stop()

    def _closed(self, peer: Peer) -> None:
        if peer is self._peer:
            self._over.set()

    def _watch(self) -> None:
        """Checks whether the router has sent anything. Counts checks, not seconds: if this process itself has hung, the
        router's messages are still waiting to be read."""
        if not self._watch_s or not self._peer:
            return
        if self._num_silent > NUM_PINGS:
            logger.warning(
                "The router hangs: it has sent nothing for %.0f s", self._num_silent * self._watch_s
            )
            self._peer.abort()
            return
        self._num_silent += 1
        self._watching = asyncio.get_running_loop().call_later(self._watch_s, self._watch)

    def _disconnect(self) -> None:
        if self._watching:
            self._watching.cancel()
        self._num_silent = 0
        peer, self._peer = self._peer, None
        if peer:
            peer.close()
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
