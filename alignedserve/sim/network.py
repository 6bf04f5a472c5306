"""Connections to the router in virtual time.

Messages of one end arrive at the other, in order, each after a latency. Messages that a process sent just before its
death arrive too, followed by the notice of its death. A closed end receives nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from alignedserve.protocol.messages import AnyMessage
from alignedserve.sim.clock import Clock

Latency = Callable[[], float]
# Returns the message after encoding and decoding.
Encode = Callable[[AnyMessage], AnyMessage]


class Receiver(Protocol):
    @property
    def is_hung(self) -> bool: ...

    def when_awake(self, action: Callable[[], None]) -> None: ...


class Client(Receiver, Protocol):
    def heard(self, connection: Connection, message: AnyMessage) -> None: ...

    def router_closed(self) -> None: ...


class Hub(Receiver, Protocol):
    def received(self, connection: Connection, message: AnyMessage) -> None: ...

    def client_closed(self, connection: Connection) -> None: ...


class Connection:
    def __init__(
        self, clock: Clock, up: Latency, down: Latency, client: Client, hub: Hub, encode: Encode
    ) -> None:
        """`up` and `down` return the seconds that the next message to the hub, or to the client, takes."""
        self._client = client
        self._hub = hub
        self._encode = encode
        self._up = _Lane(clock, up, hub, self._at_hub)
        self._down = _Lane(clock, down, client, self._at_client)
        self._client_listens = True
        self._hub_listens = True

    @property
    def is_over(self) -> bool:
        """Whether the hub has closed it, even if the client has not noticed yet."""
        return not self._hub_listens

    def to_hub(self, message: AnyMessage) -> None:
        self._up.send(self._encode(message))

    def to_client(self, message: AnyMessage) -> None:
        self._down.send(self._encode(message))

    def close_by_client(self) -> None:
        self._client_listens = False
        self._up.send(None)

    def close_by_hub(self) -> None:
        self._hub_listens = False
        self._down.send(None)

    def cut(self) -> None:
        """Cuts the connection, and loses all messages on their way. Both ends are notified."""
        self._up.cut()
        self._down.cut()

    def cut_by_hub(self) -> None:
        """Closes the hub's end, and loses all messages on their way. The client is notified."""
        self._hub_listens = False
        self._down.cut()

    def cut_by_client(self) -> None:
        self._client_listens = False
        self._up.cut()

    def _at_hub(self, message: AnyMessage | None) -> None:
        if not self._hub_listens:
            return
        if message is None:
            self._hub_listens = False
            self._hub.client_closed(self)
        else:
            self._hub.received(self, message)

    def _at_client(self, message: AnyMessage | None) -> None:
        if not self._client_listens:
            return
        if message is None:
            self._client_listens = False
            self._client.router_closed()
        else:
            self._client.heard(self, message)


class _Lane:
    """One direction of a connection. None is the last item that is sent."""

    def __init__(
        self,
        clock: Clock,
        latency: Latency,
        receiver: Receiver,
        take: Callable[[AnyMessage | None], None],
    ) -> None:
        """`take` is called with each message when the receiver is awake."""
        self._clock = clock
        self._latency = latency
        self._receiver = receiver
        self._take = take
        self._last_arrival_s = 0.0
        self._num_cuts = 0

    def send(self, message: AnyMessage | None) -> None:
        arrival_s = self._clock.now + self._latency()
        if arrival_s > self._last_arrival_s:
            self._last_arrival_s = arrival_s
        self._clock.at(self._last_arrival_s, partial(self._arrive, message, self._num_cuts))

    def cut(self) -> None:
        """Drops messages on their way. The notice that the connection is closed still arrives."""
        self._num_cuts += 1
        self.send(None)

    def _arrive(self, message: AnyMessage | None, num_cuts: int) -> None:
        if num_cuts != self._num_cuts:
            return
        if self._receiver.is_hung:
            self._receiver.when_awake(partial(self._take, message))
        else:
            self._take(message)
