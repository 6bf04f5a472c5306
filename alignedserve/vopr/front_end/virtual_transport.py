"""One end of a connection in virtual time.

Bytes are where they are in reality. Written bytes that do not fit into the window wait in the transport, and the writer
sees their number. Bytes in the window are in the kernels or on their way, and leave it when the other end reads them.
An end reads when its process runs, everything that has arrived at once.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
from asyncio.transports import _FlowControlMixin
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from alignedserve.vopr.front_end.virtual_process import process_of
from alignedserve.vopr.front_end.virtual_wire import End, Way


class VirtualSocket:
    """The socket interface that the code uses. It poses as a Unix socket, which has no relevant options."""

    family = socket.AF_UNIX

    def __init__(self, name: tuple[str, int]) -> None:
        self._name = name

    def getsockname(self) -> tuple[str, int]:
        return self._name


class EndsConnection(Protocol):
    """The connection that a transport is one end of."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def window_bytes(self) -> int: ...

    def note_read(self, name: tuple[str, int], num_bytes: int) -> None:
        """Writes to the run's journal that the end of this name has read these bytes."""

    def end_is_over(self) -> None: ...


class VirtualTransport(_FlowControlMixin):
    """A transport with asyncio's own buffer limits and notifications of the protocol."""

    _loop: asyncio.AbstractEventLoop
    _protocol: asyncio.Protocol
    _maybe_pause_protocol: Callable[[], None]
    _maybe_resume_protocol: Callable[[], None]

    def __init__(self, connection: EndsConnection, name: tuple[str, int], peer: tuple[str, int]) -> None:
        sock = VirtualSocket(name)
        super().__init__({"socket": sock, "sockname": name, "peername": peer}, connection.loop)
        self._out: Way
        self._in: Way
        self._connection = connection
        self._unsent = bytearray()
        self._inbox: deque[bytes | End] = deque()
        # It reads once it has a protocol.
        self._is_reading = self._reads_soon = False
        self._is_closing = self._is_over = False
        self._context: contextvars.Context

    def attach(self, out: Way, into: Way, context: contextvars.Context) -> None:
        """Gives this end of the connection to the kernel of the context's process."""
        self._out, self._in, self._context = out, into, context
        out.writer = into.reader = self
        if process := process_of(context):
            process.on_kill(self, self._killed)

    def begin(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """Makes the protocol of this end. Called in its process."""
        self._protocol = factory()
        self._protocol.connection_made(self)
        self.resume_reading()
        return self._protocol

    @property
    def is_over(self) -> bool:
        """Whether the kernel of this end's process has closed the connection."""
        return self._is_over

    # ---- asyncio's interface ----

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or not data:
            return
        self._unsent += data
        self.pump()
        self._maybe_pause_protocol()

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not self._unsent:
                self._lose(None, End())

    def abort(self) -> None:
        self._lose(None, End(ConnectionResetError("the other end has aborted the connection")))

    def can_write_eof(self) -> bool:
        return False

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def is_reading(self) -> bool:
        return self._is_reading and not self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self._read_soon()

    # ---- the wire ----

    def pump(self) -> None:
        """Sends as much as fits into the window."""
        while self._unsent and (room := self._connection.window_bytes - self._out.num_under_way) > 0:
            size = min(room, len(self._unsent), self._out.piece_bytes())
            self._out.send(bytes(self._unsent[:size]))
            del self._unsent[:size]

    def arrived(self, piece: bytes | End) -> None:
        if not self._is_over:
            self._inbox.append(piece)
            self._read_soon()
        elif isinstance(piece, bytes):
            # No process has this connection any more, and the kernel reports that.
            self._out.send(End(ConnectionResetError("the other end is gone")))

    def vanish(self, error: Exception | None) -> None:
        """Ends the connection at this end. The other end is not notified."""
        self._lose(error, None)

    def _read_soon(self) -> None:
        if self._inbox and self._is_reading and not self._reads_soon and not self._is_over:
            self._reads_soon = True
            self._loop.call_soon(self._read, context=self._context)

    def _read(self) -> None:
        self._reads_soon = False
        if self._is_over or not self._is_reading:
            return
        data, end = b"", None
        while self._inbox and end is None:
            piece = self._inbox.popleft()
            data, end = (data, piece) if isinstance(piece, End) else (data + piece, None)
        self._take(data)
        if end:
            self._ended(end)

    def _take(self, data: bytes) -> None:
        if not data:
            return
        self._in.num_under_way -= len(data)
        self._in.writer.room_is_free()
        self._connection.note_read(self.get_extra_info("sockname"), len(data))
        if not self._is_closing:
            self._protocol.data_received(data)

    def room_is_free(self) -> None:
        if not self._is_over:
            self.pump()
            self._maybe_resume_protocol()
            if self._is_closing and not self._unsent:
                self._lose(None, End())

    def _ended(self, end: End) -> None:
        if end.error:
            self._lose(end.error, None)
        elif not self._is_closing and not self._protocol.eof_received():
            self.close()

    def _killed(self) -> None:
        """Closes the connection of a killed process, as its kernel does. Unsent bytes are lost."""
        if not self._is_over:
            self._over()
            self._out.send(End())

    def _lose(self, error: Exception | None, farewell: End | None) -> None:
        if self._is_over:
            return
        self._over()
        if farewell:
            self._out.send(farewell)
        self._loop.call_soon(self._tell, error, context=self._context)

    def _tell(self, error: Exception | None) -> None:
        self._protocol.connection_lost(error)

    def _over(self) -> None:
        self._is_over = self._is_closing = True
        self._unsent.clear()
        self._inbox.clear()
        self._connection.end_is_over()
        if process := process_of(self._context):
            process.forget(self)
