"""One end of a connection. Its closing is the death notice, so it closes rather than limps: on a message that can't
be read, on a peer that does not read, and (by TCP's keepalive) on a host that has gone away.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

from alignedserve.messages import AnyMessage, Message
from alignedserve.wire.frames import FrameReader, WireError, frame
from alignedserve.wire.said import log_said

logger = logging.getLogger(__name__)

# So much unsent means that the peer hangs.
MAX_UNSENT_BYTES = 256 << 20

# A host that answers nothing is given up after 5 + 3 * 2 seconds.
_KEEPALIVE = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 11_000,
}


class Peer(asyncio.Protocol):
    def __init__(
        self,
        on_message: Callable[[Peer, AnyMessage], None],
        on_closed: Callable[[Peer], None],
        on_open: Callable[[Peer], None] | None = None,
    ) -> None:
        self.name = "?"
        # whoever pings counts here; anything that comes is an answer
        self.num_unanswered = 0
        self._on_message = on_message
        self._on_closed = on_closed
        self._on_open = on_open
        self._reader = FrameReader()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: Message) -> None:
        """Nothing happens when the connection is closed: whoever sends hears of that by `on_closed`.

        What is sent in one turn of the event loop leaves in one write.
        """
        if not self.is_open:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame(message))
        log_said(logger, "to", self.name, message)

    def close(self) -> None:
        """After what was sent. Safe to repeat."""
        self._flush()
        if self._transport:
            self._transport.close()

    def abort(self) -> None:
        """What was sent may be lost: for a peer that does not read."""
        if self._transport:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        _watch_host(transport.get_extra_info("socket"))
        if self._on_open:
            self._on_open(self)

    def data_received(self, data: bytes) -> None:
        self.num_unanswered = 0
        try:
            for message in self._reader.feed(data):
                if not self.is_open:
                    return
                log_said(logger, "from", self.name, message)
                self._on_message(self, message)
        except WireError as error:
            logger.warning("Closing the connection to %s: %s", self.name, error)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._unsent.clear()
        self._on_closed(self)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if not unsent or not self.is_open:
            return
        transport = cast(asyncio.Transport, self._transport)
        transport.write(b"".join(unsent))
        num_waiting = transport.get_write_buffer_size()
        if num_waiting > MAX_UNSENT_BYTES:
            logger.warning(
                "Closing the connection to %s: it does not read, %d bytes wait", self.name, num_waiting
            )
            transport.abort()


def _watch_host(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
