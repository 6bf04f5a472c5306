"""One HTTP connection: uvicorn's protocol behind `Framing`, with a time limit for every wait for the client.

The protocol is always h11, even if another one is installed that uvicorn would prefer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from alignedserve.gateway.http.connections import READ_BYTES, Connections, Doing, holder_at
from alignedserve.gateway.http.errors import AnswerBrokenOff, ApiError, unavailable
from alignedserve.gateway.http.framing import MAX_HEAD_BYTES, BadRequest, Framing, asked_headers, asked_path
from alignedserve.gateway.http.keys import Keys, authorizations_of

logger = logging.getLogger(__name__)

# Seconds within which a request's head must arrive, after it has begun or the connection was opened.
HEAD_S = 20.0
# Seconds after which a client that reads nothing of its answer is considered gone.
HEARD_S = 60.0
# Seconds within which the last bytes before a close must be sent.
CLOSE_S = 60.0
# A client that is still sending when its connection is closed would not see the reason: its system discards what it has
# not read. So only the sending side is closed at first, and received bytes are discarded, up to these bounds of seconds
# and bytes. Most clients send the whole of a file that is too large before they read the answer.
LINGER_S = 10.0
LINGER_BYTES = 1 << 30
# If at most this much of an unneeded body is left, the connection is kept.
MAX_UNREAD_BYTES = 64 << 10
# Paths that load balancers and Kubernetes request to see whether the system answers, and whether this process hangs.
PROBED = frozenset({"/health", "/ping", "/"})
_HEAD_END = b"\r\n\r\n"
# Sent to a client that has closed its sending side, until its answer begins: if it has closed the other side too, its
# system resets the connection. A client ignores it. First and longest pause between two of them, in seconds.
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_S, MAX_PROBE_S = 0.004, 0.5
# States of a connection in Linux: the client has closed its sending side, and it has reset the connection.
_CLOSE_WAIT, _CLOSED = 8, 7


class _Transport:
    """A transport that drops what is written after it was closed. asyncio drops that too, but logs a warning for each
    piece, and there may be hundreds before it reports that the client has disconnected."""

    def __init__(self, transport: asyncio.Transport, connection: HttpConnection) -> None:
        self._transport = transport
        self._connection: HttpConnection | None = connection
        self._timer: asyncio.TimerHandle | None = None
        # Whether uvicorn has paused reading because it has enough of a body for now.
        self._is_paused = False
        # Whether the connection waits until others were read.
        self._awaits_turn = False

    @property
    def is_lingering(self) -> bool:
        return self._timer is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.is_lingering or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if not self.is_closing():
            self._transport.write(data)

    def pause_reading(self) -> None:
        self._is_paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        if not self._awaits_turn:
            self._transport.resume_reading()

    def await_turn(self) -> None:
        self._awaits_turn = True
        self._transport.pause_reading()

    def read_on(self) -> None:
        self._awaits_turn = False
        if not self._is_paused:
            self._transport.resume_reading()

    @property
    def state(self) -> int:
        """The connection's state in Linux. It includes what the client has done since the last read."""
        sock = self._transport.get_extra_info("socket")
        return int(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0])

    def close(self) -> None:
        if self._connection and self._connection.is_still_told:
            self.linger()
        elif not self.is_lingering:
            self._transport.close()

    def linger(self) -> None:
        if self.is_closing():
            return
        # A client that reads its answer slowly gets the same time as on an open connection.
        after_s = CLOSE_S if self._transport.get_write_buffer_size() else LINGER_S
        self._timer = asyncio.get_running_loop().call_later(after_s, self._transport.abort)
        try:
            self._transport.write_eof()
        except OSError:
            # The client has disconnected.
            self._transport.abort()
        else:
            self._transport.resume_reading()

    def forget(self) -> None:
        if self._timer:
            self._timer.cancel()

    def let_go(self) -> None:
        """Breaks the reference cycle after the connection has ended."""
        self._connection = None


class HttpConnection(H11Protocol, asyncio.BufferedProtocol):
    """A connection with time limits: it is closed if its client sends no request or does not read its answer. uvicorn
    would wait without end."""

    _unheard: asyncio.TimerHandle | None = None
    transport: Any

    def __init__(self, connections: Connections, keys: Keys, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._crowd = connections
        self._keys = keys
        self._framing = Framing()
        # Received bytes that are not parsed yet.
        self._arrived = bytearray()
        # Whether a request waits for its turn to begin.
        self._awaits_turn = False
        # The lane in which it waits.
        self._lane = ""
        # Whether the client of the request that begins or is answered may be sent interim answers.
        self._takes_interim = True
        # Whether the last answer that has begun is a stream of events.
        self._streams_events = False
        # Whether the client has closed its sending side.
        self._has_ended = False
        self._num_dropped = 0
        self._app, self.app = self.app, self._answer

    # ---- opened and closed ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Transport(transport, self))  # type: ignore[arg-type]
        self._idle_since_s = self.loop.time()
        self._watch()
        self._holder = holder_at(self.client[0] if self.client else "")
        if self._crowd.begin(self, self._holder):
            # The event loop reads it for the first time in its next turn.
            self.loop.call_soon(self.loop.call_soon, self._note)
        else:
            # Closed at once: a connection that is not counted must not stay open.
            transport.write(_written(unavailable("all available connections are in use")))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self.transport.forget()
        self._heard()
        self._crowd.reads.leave(self.transport)
        self._crowd.beginnings.drop(self._begin, self._lane)
        self._awaits_turn = False
        self._crowd.end(self)
        if self._is_answering:
            self._crowd.losses.do(partial(self._lose, exc))
        else:
            self._lose(exc)

    def _lose(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # Leaves no reference cycles, because the garbage collector would find those of a thousand connections at once.
        self.app = self._app
        self.transport.let_go()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether the connection stays open: a client may close only its sending side, and wait for the answer
        to a whole request. It can't be told from one that has gone while nothing can be sent to it: with HTTP/1.0,
        which has no interim answers, and between the events of a stream."""
        can_be_probed = self._takes_interim and not (self._is_answering and self._streams_events)
        is_kept = self._has_whole_request and can_be_probed and not self.transport.is_closing()
        if is_kept and not self._has_ended:
            self._has_ended = True
            self._probe(PROBE_S)
        return is_kept

    @property
    def _has_whole_request(self) -> bool:
        return self._awaits_turn or (self._is_answering and self._framing.is_between)

    def _probe(self, pause_s: float) -> None:
        """Sends interim answers until the answer begins. They fail if the client waits for none."""
        is_waiting = self._awaits_turn or (self._is_answering and not self.cycle.response_started)
        if is_waiting and not self.transport.is_closing():
            self.transport.write(_CONTINUE)
            self.loop.call_later(pause_s, self._probe, min(4 * pause_s, MAX_PROBE_S))

    @property
    def _is_gone(self) -> bool:
        """Whether the client is known to wait for no answer, before a request begins."""
        if self.transport.state == _CLOSE_WAIT and self._takes_interim:
            self.transport.write(_CONTINUE)
        return self.transport.state == _CLOSED or (
            self.transport.state == _CLOSE_WAIT and not self._takes_interim
        )

    def abort(self) -> None:
        self.transport.abort()

    def shutdown(self) -> None:
        if self._awaits_turn:
            self._crowd.beginnings.drop(self._begin, self._lane)
            self._begin()
        if not self.transport.is_lingering:
            super().shutdown()
        if self.transport.is_lingering:
            self.abort()

    # ---- requests ----

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._crowd.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.transport.is_closing():
            self._drop(nbytes)
        else:
            self.data_received(bytes(self._crowd.read_buffer[:nbytes]))
            if nbytes == READ_BYTES and not self.transport.is_closing():
                self.transport.await_turn()
                self._crowd.reads.wait(self.transport)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._go_on_from(len(self._arrived), data)

    def _go_on_from(self, num_seen: int, data: bytes = b"") -> None:
        """Parses the received bytes. If they complete a request's head, that waits for this connection's turn; an
        incomplete head does not. Bytes before `num_seen` were already searched for the end of a head."""
        self._arrived += data
        if self._awaits_turn:
            self._bound_arrived()
            return
        is_between = self._framing.is_between and not self._is_answering
        if is_between and self._arrived.find(_HEAD_END, max(0, num_seen - len(_HEAD_END) + 1)) >= 0:
            self._await_turn()
        else:
            self._read()

    def _await_turn(self) -> None:
        """Continues when it is this connection's turn to begin a request. Owners of keys take turns, and so do the
        addresses of clients without one."""
        self._awaits_turn = True
        self._takes_interim = not self._arrived.partition(b"\r\n")[0].endswith(b"1.0")
        self._holder = self._keys.owner(authorizations_of(asked_headers(self._arrived))[0]) or self._holder
        self._crowd.hold(self, self._holder)
        # Behind a thousand other requests, a load balancer would consider this server dead.
        is_probe = asked_path(self._arrived) in PROBED
        self._lane = f"probes of {self._holder}" if is_probe else self._holder
        self._crowd.beginnings.do(self._begin, self._lane)
        if self._awaits_turn:
            self._bound_arrived()
            self._note()

    def _bound_arrived(self) -> None:
        # It is read on until then, because a client that hangs up is noticed only by reading.
        if len(self._arrived) > MAX_HEAD_BYTES:
            self.flow.pause_reading()

    def _begin(self) -> None:
        self._awaits_turn = False
        if self.transport.is_closing():
            return
        if self._is_gone:
            self.abort()
            return
        self.flow.resume_reading()
        self._read()

    @property
    def is_still_told(self) -> bool:
        """Whether the client is in the middle of a request, or has begun another one, and may send more of it."""
        return not self._has_ended and (not self._framing.is_between or bool(self._arrived))

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _read(self) -> None:
        """Parses up to one request, until it is answered."""
        try:
            while not self.transport.is_closing():
                if self._framing.is_between and self._is_answering:
                    if self._arrived:
                        # The next request waits in the buffer, and what follows it waits in the socket.
                        self.flow.pause_reading()
                    break
                piece = self._framing.take(self._arrived)
                if not piece:
                    break
                self.conn.receive_data(piece)
                self.handle_events()
        except BadRequest as error:
            self._refuse(ApiError(error.status, str(error)))
        if self._has_ended and not self._has_whole_request and not self.transport.is_closing():
            # The rest of this request won't arrive. The answers before it are still sent.
            self.transport.close()
        self._note()

    def _drop(self, num_bytes: int) -> None:
        self._num_dropped += num_bytes
        if self._num_dropped > LINGER_BYTES:
            self.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answers with the error. Nothing more is parsed."""
        logger.debug("refused: %s", error)
        if self._is_answering:
            is_begun = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if is_begun:
                self.abort()
                return
        self.transport.write(_written(error))
        self.transport.linger()

    def send_400_response(self, msg: str) -> None:
        """Refuses a request that h11 does not accept."""
        self._refuse(ApiError(400, msg))

    def _unsupported_upgrade_warning(self) -> None:
        """Does nothing: a client that offers another protocol gets this one, and that is not logged."""

    # ---- answers ----

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = self.cycle
        self._streams_events = False

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                kind = next((value for name, value in headers if name == b"content-type"), b"")
                self._streams_events = kind.startswith(b"text/event-stream")
                if self._crowd.is_retiring:
                    # No client sends another request after such a head.
                    headers.append((b"connection", b"close"))
                message["headers"] = headers
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except AnswerBrokenOff:
            cycle.disconnected = True
            self.abort()

    def on_response_complete(self) -> None:
        self._idle_since_s = self.loop.time()
        super().on_response_complete()
        self._note()
        num_left = self._framing.num_left
        if num_left is None or num_left > MAX_UNREAD_BYTES:
            self.transport.close()
        elif self._arrived:
            # Each waiting request begins in a turn of the event loop of its own.
            self.loop.call_soon(self._go_on_from, 0)
        elif self._has_ended:
            self.transport.close()

    def pause_writing(self) -> None:
        self._unheard = self.loop.call_later(HEARD_S, self.transport.abort)
        super().pause_writing()
        self._note()

    def resume_writing(self) -> None:
        self._heard()
        super().resume_writing()
        self._note()

    def _heard(self) -> None:
        if self._unheard:
            self._unheard.cancel()

    def _note(self) -> None:
        is_stalled = not self._framing.is_between or self.flow.write_paused
        is_begun = self._is_answering or self._awaits_turn
        is_idle = not is_begun or self.transport.is_closing()
        doing = Doing.IDLE if is_idle else Doing.STALLED if is_stalled else Doing.BUSY
        self._crowd.note(self, doing)

    def _watch(self) -> None:
        if self.transport.is_closing():
            # The connection waits until its client has read the rest.
            self._timer = self.loop.call_later(CLOSE_S, self.transport.abort)
            return
        is_begun = self._is_answering or self._awaits_turn
        left_s = HEAD_S if is_begun else self._idle_since_s + HEAD_S - self.loop.time()
        if left_s <= 0:
            self.transport.close()
        self._timer = self.loop.call_later(max(left_s, 0.0), self._watch)


def _written(error: ApiError) -> bytes:
    """Returns the error as an HTTP response, after which the connection is closed."""
    body = msgspec.json.encode(error.body)
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in (headers | error.headers).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
