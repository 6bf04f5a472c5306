"""Connections in virtual time.

Messages of one end arrive at the other, in order, each after a latency. Messages that a process sent just before its
death arrive too, followed by the notice of its death. A closed end receives nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from alignedserve.protocol.host import Link
from alignedserve.protocol.messages import AnyMessage, Message
from alignedserve.sim.clock import Clock
from alignedserve.sim.host import SimHost

Latency = Callable[[], float]
# Returns the message after encoding and decoding.
Encode = Callable[[AnyMessage], AnyMessage]


class SimLink:
    """One end of a connection, in the process of its host."""

    # The other end.
    other: SimLink

    def __init__(
        self,
        clock: Clock,
        host: SimHost,
        latency: Latency,
        encode: Encode,
        on_message: Callable[[Link, AnyMessage], None],
        on_closed: Callable[[Link], None],
    ) -> None:
        """`latency` returns the seconds that the next message to the other end takes."""
        self.name = "a stranger"
        self.num_unanswered = 0
        self.is_open = True
        self._clock = clock
        self._host = host
        self._latency = latency
        self._encode = encode
        self._on_message = on_message
        self._on_closed = on_closed
        self._last_arrival_s = 0.0
        # Messages that were sent before the last cut are lost.
        self._num_cuts = 0
        host.links[self] = None

    @property
    def is_over(self) -> bool:
        """Whether the other end has closed the connection, even if this end has not noticed yet."""
        return not self.other.is_open

    def send(self, message: Message) -> None:
        if self.is_open:
            self._put(self._encode(cast(AnyMessage, message)))

    def limit(self, max_frame_bytes: int) -> None:
        """Does nothing, because there are no frames."""

    def close(self) -> None:
        if self.is_open:
            self._put(None)
            self._end()

    def abort(self) -> None:
        if self.is_open:
            self._lose()
            self._end()

    def cut(self) -> None:
        """Cuts the connection, and loses all messages on their way. Both ends are notified."""
        self._lose()
        self.other._lose()

    def _put(self, message: AnyMessage | None) -> None:
        """None is the last item."""
        self._last_arrival_s = max(self._last_arrival_s, self._clock.now + self._latency())
        self._clock.at(self._last_arrival_s, partial(self.other._arrive, message, self._num_cuts))

    def _lose(self) -> None:
        """Loses messages on their way to the other end. It is notified that the connection is closed."""
        self._num_cuts += 1
        self._put(None)

    def _arrive(self, message: AnyMessage | None, num_cuts: int) -> None:
        if num_cuts != self.other._num_cuts:
            return
        if self._host.is_hung:
            self._host.when_awake(partial(self._take, message))
        else:
            self._take(message)

    def _take(self, message: AnyMessage | None) -> None:
        if not self.is_open:
            return
        if message is None:
            self._end()
        else:
            self.num_unanswered = 0
            self._on_message(self, message)

    def _end(self) -> None:
        self.is_open = False
        del self._host.links[self]
        self._host.after(0.0, partial(self._on_closed, self))
