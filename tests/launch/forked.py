"""Runs a function in a fork of this process: it has what is imported here, and what it changes is gone with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")


def in_a_fork(function: Callable[..., T], *arguments: Any) -> T:
    """What it returns. Raises EOFError if it returns nothing, its traceback being on stderr."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_run, args=(sender, function, arguments))
    child.start()
    sender.close()
    try:
        found: T = receiver.recv()
    finally:
        child.join()
    return found


def _run(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    sender.send(function(*arguments))
