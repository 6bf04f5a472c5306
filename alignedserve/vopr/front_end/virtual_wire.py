"""Data on its way between the two ends of a connection: pieces of bytes, in order, and then the end."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from alignedserve.sim.clock import SimTimer

if TYPE_CHECKING:
    from alignedserve.vopr.front_end.virtual_network import VirtualConnection
    from alignedserve.vopr.front_end.virtual_transport import VirtualTransport


class End:
    """Follows the last byte: the other end has closed the connection, in good order or with an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


class Way:
    """One direction of a connection."""

    def __init__(self, connection: VirtualConnection, is_up: bool) -> None:
        """`is_up`: from the process that has connected."""
        self.writer: VirtualTransport
        self.reader: VirtualTransport
        # The bytes in the window.
        self.num_under_way = 0
        # No piece arrives before this time.
        self.stalled_until_s = 0.0
        self._connection = connection
        self._is_up = is_up
        self._pieces: deque[tuple[float, bytes | End]] = deque()
        self._next: SimTimer | None = None

    def send(self, piece: bytes | End) -> None:
        clock, network = self._connection.network.loop.clock, self._connection.network
        last_s = self._pieces[-1][0] if self._pieces else 0.0
        delay_s = network.latency(self._connection.process, self._is_up) + self._connection.delay_s
        self._pieces.append((max(last_s, clock.now + delay_s), piece))
        if isinstance(piece, bytes):
            self.num_under_way += len(piece)
        if self._next is None:
            self._await_next()

    @property
    def piece_bytes(self) -> int:
        """The most bytes of the next piece."""
        return self._connection.network.piece_bytes(self._connection.process, self._is_up)

    def lose(self) -> None:
        """Loses everything on its way."""
        self._pieces.clear()
        if self._next:
            self._next.cancel()
            self._next = None

    def _await_next(self) -> None:
        clock = self._connection.network.loop.clock
        arrival_s = max(self._pieces[0][0], self.stalled_until_s, clock.now)
        if arrival_s < float("inf"):
            self._next = clock.at(arrival_s, self._arrive)

    def _arrive(self) -> None:
        self._next = None
        if self._connection.network.loop.clock.now >= self.stalled_until_s:
            self.reader.arrived(self._pieces.popleft()[1])
        if self._pieces and self._next is None:
            self._await_next()
