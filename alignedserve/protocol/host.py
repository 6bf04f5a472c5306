"""What the shells of processes ask of the machine that they run on, live or in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.frames import frame
from alignedserve.protocol.handshake import ClientHandshake
from alignedserve.protocol.messages import AnyMessage, Hello, Message
from alignedserve.protocol.peer import Peer


class Timer(Protocol):
    def cancel(self) -> None:
        """Safe to repeat."""


class Link(Protocol):
    """One end of a connection."""

    # The other end's name, for logs.
    name: str
    # Pings since anything last arrived, counted by the end that pings.
    num_unanswered: int

    @property
    def is_proven(self) -> bool:
        """Whether the other end has proved that it knows the token."""

    @property
    def is_over(self) -> bool:
        """Whether the other end has closed the connection, even if this end still has data to read before it notices.
        Safe on any thread."""

    def send(self, message: Message) -> None:
        """Sends the message. Does nothing after the connection is closed."""

    def limit(self, max_frame_bytes: int) -> None:
        """Sets the most bytes in each frame that is received from now on."""

    def close(self) -> None:
        """Closes the connection after sending the pending messages. Safe to repeat."""

    def abort(self) -> None:
        """Closes the connection at once. Pending messages may be lost."""


class Host(Protocol):
    def now(self) -> float:
        """Returns the seconds of a monotonic clock."""

    def after(self, seconds: float, action: Callable[[], object]) -> Timer:
        """Calls the action in the process that runs now, unless that has ended by then."""


class Connecting(Protocol):
    """A process that connects to a router."""

    def opened(self, link: Link) -> None: ...

    def received(self, link: Link, message: AnyMessage) -> None: ...

    def lost(self, link: Link | None) -> None:
        """Called when the connection is closed, by either end. None: nothing listens at the address."""


class ClientHost(Host, Protocol):
    def connect(self, address: RouterAddress, hello: Callable[[], Hello], process: Connecting) -> None:
        """Opens a connection to the router at this address. `hello` returns the first message on it."""


class LiveHost:
    """The event loop of this process."""

    def __init__(self) -> None:
        self._opening: set[asyncio.Task[None]] = set()

    def now(self) -> float:
        return time.monotonic()

    def after(self, seconds: float, action: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, action)

    def connect(self, address: RouterAddress, hello: Callable[[], Hello], process: Connecting) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(address, hello, process))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, address: RouterAddress, hello: Callable[[], Hello], process: Connecting) -> None:
        def make_peer() -> Peer:
            handshake = ClientHandshake(address.token, lambda: frame(hello()))
            return Peer(handshake, process.received, process.lost, process.opened)

        loop = asyncio.get_running_loop()
        try:
            if address.path is not None:
                await loop.create_unix_connection(make_peer, address.path)
                return
            transport, _ = await loop.create_connection(make_peer, address.host, address.port)
        except (OSError, UnicodeError):
            # A name can be one that no lookup accepts.
            process.lost(None)
            return
        if transport.get_extra_info("sockname") == transport.get_extra_info("peername"):
            # TCP can connect a socket to itself, if its own port happens to be the one that it connects to.
            transport.abort()
