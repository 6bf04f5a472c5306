"""What the router's core is told, and what it answers with. A log of events replays to the same orders.

Of each connection the core hears `Connected` first, then what was `Received`, then `Closed`, and of a process's next
connection only after that.
"""

from __future__ import annotations

from alignedserve.protocol.messages import AnyMessage, Hello, Message
from alignedserve.types import Epoch, InstanceId


class Connected(Message):
    hello: Hello


class Closed(Message):
    """The connection is gone. For the router, so is the process."""

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
