"""The signals that end `alignedserve serve`. This module imports nothing slow, because it is used first."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

# A terminal that closes sends SIGHUP, and its shell may send another.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_at_signals() -> None:
    """Ends this process, which has started nothing yet, at a signal."""
    on_signals(lambda number: os._exit(0))


def on_signals(act: Callable[[int], object]) -> None:
    """Calls `act` with the number of each signal."""
    for number in ENDING:
        # A program that nohup started must ignore SIGHUP.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: act(number))


def hold_signals() -> None:
    """Lets signals wait until `release_signals`. Child processes inherit that."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def ignore_signals() -> None:
    """Ignores the signals until the process ends. Python would remove handlers before that."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
