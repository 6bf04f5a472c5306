"""What a process does when it is asked to end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable


def stop_on_sigterm(stop: Callable[[], None]) -> None:
    """On SIGTERM, calls `stop` in the running event loop. Only a process's main thread can receive it; elsewhere this
    does nothing."""
    if threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
