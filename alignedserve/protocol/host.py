"""What the shells of processes ask of the machine that they run on, live or in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from alignedserve.protocol.messages import Message


class Timer(Protocol):
    def cancel(self) -> None:
        """Safe to repeat."""


class Host(Protocol):
    def now(self) -> float:
        """Returns the seconds of a monotonic clock."""

    def after(self, seconds: float, action: Callable[[], object]) -> Timer:
        """Calls the action in the process that runs now, unless that has ended by then."""


class Link(Protocol):
    """One end of a connection."""

    # The other end's name, for logs.
    name: str
    # Pings since anything last arrived, counted by the end that pings.
    num_unanswered: int

    def send(self, message: Message) -> None:
        """Sends the message. Does nothing after the connection is closed."""

    def limit(self, max_frame_bytes: int) -> None:
        """Sets the most bytes in each frame that is received from now on."""

    def close(self) -> None:
        """Closes the connection after sending the pending messages. Safe to repeat."""

    def abort(self) -> None:
        """Closes the connection at once. Pending messages may be lost."""


class LiveHost:
    """The event loop of this process."""

    def now(self) -> float:
        return time.monotonic()

    def after(self, seconds: float, action: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, action)
