"""The host of a simulated process: its clock, its timers, and its ends of connections.

A process that hangs neither acts nor answers: timers and messages wait until it wakes up. Nothing outlives a life of
the process: its timers don't fire any more, and its connections close.

Messages of one end of a connection arrive at the other, in order, each after a latency. Messages that a process sent
just before its death arrive too, followed by the notice of its death. A closed end receives nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

from alignedserve.protocol.host import Link
from alignedserve.protocol.messages import AnyMessage, Message
from alignedserve.sim.clock import Clock, LocalClock, SimTimer

Latency = Callable[[], float]
# Returns the message after encoding and decoding.
Encode = Callable[[AnyMessage], AnyMessage]


class ProcessSockets(Protocol):
    """Sockets of the process, in a whole system."""

    def hang(self) -> None: ...

    def wake_up(self) -> None: ...

    def kill(self) -> None: ...


class SimHost:
    def __init__(self, clock: Clock) -> None:
        self.local_clock = LocalClock(clock)
        self.now = self.local_clock.now
        self.is_hung = False
        # Its open ends of connections, the oldest first.
        self.links: dict[SimLink, None] = {}
        # They hang and die with it.
        self.parts: list[ProcessSockets] = []
        self.clock = clock
        self._life = 0
        # Events that are handled when it wakes up, in this order.
        self._held: list[Callable[[], object]] = []

    def after(self, seconds: float, action: Callable[[], object]) -> SimTimer:
        """Returns a timer that can be cancelled until it acts, which a process that hangs does when it wakes up."""
        timer = SimTimer(action)
        self.clock.after(seconds, partial(self.when_awake, partial(self._act, timer, self._life)))
        return timer

    def _act(self, timer: SimTimer, life: int) -> None:
        if life == self._life and timer.action:
            timer.action()

    def when_awake(self, action: Callable[[], object]) -> None:
        """Runs the action now, or when the process wakes up; never if it is killed before."""
        if self.is_hung:
            self._held.append(action)
        else:
            action()

    def hang(self) -> None:
        """Hangs the process and stops its clock, as when a machine is suspended. Safe to repeat."""
        self.is_hung = True
        self.local_clock.stand_still(True)
        for part in self.parts:
            part.hang()

    def wake_up(self) -> None:
        """Safe to repeat."""
        self.is_hung = False
        self.local_clock.stand_still(False)
        held, self._held = self._held, []
        for action in held:
            action()
        for part in self.parts:
            part.wake_up()

    def kill(self) -> None:
        """Ends the process. Its next life begins awake."""
        for link in list(self.links):
            link.close()
        for part in self.parts:
            part.kill()
        self.parts.clear()
        self._life += 1
        self._held.clear()
        self.is_hung = False
        self.local_clock.stand_still(False)


class SimLink:
    """One end of a connection, in the process of its host."""

    # The other end.
    other: SimLink

    def __init__(
        self,
        host: SimHost,
        latency: Latency,
        encode: Encode,
        on_message: Callable[[Link, AnyMessage], None],
        on_closed: Callable[[Link], None],
    ) -> None:
        """`latency` returns the seconds that the next message to the other end takes."""
        self.name = "a stranger"
        self.num_unanswered = 0
        self.is_proven = self.is_open = True
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
        self._last_arrival_s = max(self._last_arrival_s, self._host.clock.now + self._latency())
        self._host.clock.at(self._last_arrival_s, partial(self.other._arrive, message, self._num_cuts))

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
