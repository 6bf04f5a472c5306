"""Handling of the signals that end a process."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable


def stop_on_sigterm(stop: Callable[[], None]) -> None:
    """Calls `stop` in the running event loop on SIGTERM. Does nothing outside a process's main thread, because only
    that can receive signals."""
    if threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
