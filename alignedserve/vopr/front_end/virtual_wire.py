"""Data on its way between the two ends of a connection: pieces of bytes, in order, and then the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from alignedserve.sim.clock import Clock, SimTimer


class End:
    """Follows the last byte: the other end has closed the connection, in good order or with an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


class WayWriter(Protocol):
    def room_is_free(self) -> None: ...


class WayReader(Protocol):
    def arrived(self, piece: bytes | End) -> None: ...


class Way:
    """One direction of a connection."""

    def __init__(self, clock: Clock, latency: Callable[[], float], piece_bytes: Callable[[], int]) -> None:
        """`latency` returns the seconds that the next piece takes, and `piece_bytes` its most bytes."""
        self.writer: WayWriter
        self.reader: WayReader
        # The bytes in the window.
        self.num_under_way = 0
        # No piece arrives before this time.
        self.stalled_until_s = 0.0
        self._clock = clock
        self._latency = latency
        self.piece_bytes = piece_bytes
        self._pieces: deque[tuple[float, bytes | End]] = deque()
        self._next: SimTimer | None = None

    def send(self, piece: bytes | End) -> None:
        last_s = self._pieces[-1][0] if self._pieces else 0.0
        self._pieces.append((max(last_s, self._clock.now + self._latency()), piece))
        if isinstance(piece, bytes):
            self.num_under_way += len(piece)
        if self._next is None:
            self._await_next()

    def lose(self) -> None:
        """Loses everything on its way."""
        self._pieces.clear()
        if self._next:
            self._next.cancel()
            self._next = None

    def _await_next(self) -> None:
        arrival_s = max(self._pieces[0][0], self.stalled_until_s, self._clock.now)
        if arrival_s < float("inf"):
            self._next = self._clock.at(arrival_s, self._arrive)

    def _arrive(self) -> None:
        self._next = None
        if self._clock.now >= self.stalled_until_s:
            self.reader.arrived(self._pieces.popleft()[1])
        if self._pieces and self._next is None:
            self._await_next()
