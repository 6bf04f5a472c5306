"""The events that the router's core receives, and its orders. A log of events replays to the same orders.

For each connection the core receives `Connected` first, then any `Received`, then `Closed`. Events of a process's next
connection follow only after that.
"""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.protocol.messages import AnyMessage, Hello, Message
from alignedserve.types import Epoch, InstanceId


class Connected(Message):
    hello: Hello


class Closed(Message):
    """The connection is gone. To the router, so is the process."""

    instance_id: InstanceId
    epoch: Epoch


class Received(Message):
    sender: InstanceId
    message: AnyMessage


class Tick(Message):
    """Time has passed."""


class Send(Message):
    to: InstanceId
    message: AnyMessage


Event = Connected | Closed | Received | Tick


# Called with each step of a router's core: the time in seconds, the event, and the core's orders.
Observer = Callable[[float, Event, list[Send]], None]
