"""What the shells of processes ask of the machine that they run on, live or in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None:
        """Safe to repeat."""


class Host(Protocol):
    def now(self) -> float:
        """Returns the seconds of a monotonic clock."""

    def after(self, seconds: float, action: Callable[[], object]) -> Timer:
        """Calls the action in the process that runs now, unless that has ended by then."""


class LiveHost:
    """The event loop of this process."""

    def now(self) -> float:
        return time.monotonic()

    def after(self, seconds: float, action: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, action)
