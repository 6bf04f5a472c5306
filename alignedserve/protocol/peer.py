"""One end of a connection (a `host.Link`), and the log of the messages on it.

Closing it is the death notice, so it closes rather than limps. It closes when a message can't be read, when the peer
does not read, and when the peer's host is gone (by TCP's keepalive). The connection begins with a handshake
(`handshake.py`). Until the other end has proved itself, only the handshake is sent to it, and nothing from it is
decoded.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import cast

from alignedserve.protocol.frames import FrameReader, WireError, frame
from alignedserve.protocol.handshake import Handshake, HandshakeError, ServerHandshake
from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    Candidates,
    Commit,
    DecodeReport,
    Evict,
    Failed,
    Gone,
    MakeSpare,
    Message,
    NewTokens,
    Offer,
    Prefill,
    PrefillReport,
    Rejected,
    Release,
    Request,
    Reserve,
    Reserved,
    Stage,
    Submit,
    Tokens,
    Unstage,
)
from alignedserve.protocol.rate_limited_log import RateLimitedLog
from alignedserve.types import RequestKey

logger = logging.getLogger(__name__)
_of_strangers = RateLimitedLog(logger)

# Unsent bytes above which the peer counts as hanging.
MAX_UNSENT_BYTES = 256 << 20

# A host that does not answer is given up after 5 + 3 * 2 = 11 seconds.
_KEEPALIVE = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 11_000,
}


class Peer(asyncio.Protocol):
    def __init__(
        self,
        handshake: Handshake,
        on_message: Callable[[Peer, AnyMessage], None],
        on_closed: Callable[[Peer], None],
        on_open: Callable[[Peer], None] | None = None,
    ) -> None:
        self.name = "a stranger"
        self.num_unanswered = 0
        self._on_message = on_message
        self._on_closed = on_closed
        self._on_open = on_open
        self._handshake = handshake
        # The bytes received so far of the part that the handshake expects next.
        self._due = b""
        self._reader = FrameReader()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    @property
    def is_proven(self) -> bool:
        return not self._handshake.num_bytes

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_over(self) -> bool:
        sock = self._transport.get_extra_info("socket") if self._transport else None
        if sock is None or (number := sock.fileno()) < 0:
            return True
        poll = select.poll()
        poll.register(number, select.POLLRDHUP)
        # Errors are reported without being requested.
        found = poll.poll(0)
        # If this end was closed meanwhile, the number may belong to another file.
        return bool(found) or sock.fileno() != number

    def send(self, message: Message) -> None:
        """Sends the message. Does nothing while the other end is unproven, or after the connection is closed
        (`on_closed` reports that). Messages sent in one turn of the event loop leave in one write."""
        if not self.is_open or not self.is_proven:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame(message))
        log_message(logger, "to", self.name, message)

    def limit(self, max_frame_bytes: int) -> None:
        self._reader.max_bytes = max_frame_bytes

    def close(self) -> None:
        self._flush()
        if self._transport:
            self._set_linger(is_on=False)
            self._transport.close()

    def abort(self) -> None:
        if self._transport:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        _watch_host(transport.get_extra_info("socket"))
        if isinstance(self._handshake, ServerHandshake):
            # If this process is killed or cuts the connection, the other end has to notice even with a full receive
            # buffer: see `is_over`.
            self._set_linger(is_on=True)
        self._transport.write(self._handshake.opening)
        if self._on_open:
            self._on_open(self)

    def data_received(self, data: bytes) -> None:
        self.num_unanswered = 0
        try:
            if not self.is_proven:
                data = self._shake(data)
            for message in self._reader.feed(data):
                if not self.is_open:
                    return
                log_message(logger, "from", self.name, message)
                self._on_message(self, message)
        except HandshakeError as error:
            _of_strangers.warning(f"Closing the connection to {self.name}: {error}")
            self.abort()
        except WireError as error:
            logger.warning("Closing the connection to %s: %s", self.name, error)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._unsent.clear()
        # The socket is closed when this call has returned. This end acts on that only afterwards, so `is_over` is
        # already true at the other end.
        asyncio.get_running_loop().call_soon(self._on_closed, self)

    def _set_linger(self, is_on: bool) -> None:
        """Sets what closing the socket does. With `is_on`, it drops unsent data and resets the connection, which the
        other end notices at once. A Unix socket always does so."""
        sock = self._transport.get_extra_info("socket") if self._transport else None
        if sock is not None and sock.family != socket.AF_UNIX and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", is_on, 0))

    def _shake(self, data: bytes) -> bytes:
        """Feeds the handshake and returns the bytes that follow it."""
        assert self._transport
        data = self._due + data
        while (num_bytes := self._handshake.num_bytes) and len(data) >= num_bytes:
            self._transport.write(self._handshake.take(data[:num_bytes]))
            data = data[num_bytes:]
        if not self.is_proven:
            self._due = data
            return b""
        self._due = b""
        if isinstance(self._handshake, ServerHandshake):
            self._reader = FrameReader(self._handshake.digest)
        return data

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
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# ---- the log of messages ---------------------------------------------------------------------------------------------

# Debug log lines about messages, in each process, with the id of the HTTP call where it is known.
#
# The lines contain nothing of a prompt, an output or a setting. Tokens are logged when they are a request's first or
# last.

# A request and the id of its HTTP call; "" if the message does not have it.
About = tuple[RequestKey, str]


def log_message(logger: logging.Logger, verb: str, name: str, message: Message) -> None:
    """Writes a log line for each request of the message. `verb` is "to" or "from"; `name` is the other process's
    name."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    kind = type(message).__name__
    for key, request_id in about(message):
        fields = {"key": key} | ({"request_id": request_id} if request_id else {})
        logger.debug("%s %s %s", kind, verb, name, extra={"fields": fields})


def about(message: Message) -> Iterator[About]:
    match message:
        case Submit(request=request):
            yield _named(request)
        case Prefill(works=works) | Stage(works=works) | Offer(works=works):
            yield from (_named(work.request) for work in works)
        case Reserve(key=key, request_id=request_id):
            yield key, request_id
        case Reserved(key=key) | Commit(key=key) | Evict(key=key):
            yield key, ""
        case Failed(key=key) | Rejected(key=key):
            yield key, ""
        case Abort(keys=keys) | Gone(keys=keys) | MakeSpare(keys=keys) | Release(keys=keys):
            yield from _unnamed(keys)
        case Unstage(keys=keys) | Candidates(keys=keys):
            yield from _unnamed(keys)
        case Tokens(news=news):
            yield from _unnamed(_turns(news))
        case PrefillReport() as report:
            yield from _unnamed([*_turns(report.news), *(key for key, _ in report.saved), *report.staged])
        case DecodeReport() as report:
            evicted = (key for key, _ in report.evicted)
            yield from _unnamed([*report.admitted, *_turns(report.news), *evicted, *report.dropped])


def _named(request: Request) -> About:
    return request.key, request.request_id


def _unnamed(keys: Iterable[RequestKey]) -> Iterator[About]:
    return ((key, "") for key in keys)


def _turns(news: Iterable[NewTokens]) -> Iterator[RequestKey]:
    return (each.key for each in news if not each.first or each.finish_reason)
