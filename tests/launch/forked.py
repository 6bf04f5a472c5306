"""Runs a function in a fork of this process: it has what is imported here, and what it changes is gone with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from alignedserve.launch.leftovers import descendants

T = TypeVar("T")
# Seconds: far more than any takes, also beside others.
LIMIT_S = 120.0


def in_a_fork(function: Callable[..., T], *arguments: Any, limit_s: float = LIMIT_S) -> T:
    """What it returns. Raises EOFError if it returns nothing, its traceback being on stderr, and TimeoutError if it
    takes longer than `limit_s`, or has not ended that long after it returned: it is killed then, with all that it
    has started."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_run, args=(sender, function, arguments))
    child.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            raise TimeoutError(f"{function.__name__}{arguments}: still runs after {limit_s:g} s")
        found: T = receiver.recv()
        child.join(limit_s)
        if child.is_alive():
            raise TimeoutError(f"{function.__name__}{arguments}: has returned, and runs {limit_s:g} s later")
    except EOFError:
        child.join(limit_s)
        raise
    finally:
        if child.is_alive():
            _kill(child)
        child.join()
        receiver.close()
    return found


def _kill(child: BaseProcess) -> None:
    assert child.pid is not None
    started = descendants(child.pid)
    child.kill()
    for pid, _ in started:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _run(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    sender.send(function(*arguments))
