"""Where transfers, and whatever else works on threads of its own, report that they have ended.

Transfers run on threads of their own; an instance's loop runs on one thread and owns everything that they are about.
So an outcome waits in `Completions` until the loop picks it up, at an iteration boundary: then `done` is called, in the
loop's thread. Every transfer that was started ends with exactly one outcome, also if it is abandoned, if its deadline
passes, or if its connection breaks; only then do its blocks belong to their owner again.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from alignedserve.types import Epoch, RequestKey


class TransferId(msgspec.Struct, frozen=True, array_like=True):
    # the epoch of the process that gives the numbers
    epoch: Epoch
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


@dataclass(frozen=True)
class Outcome:
    transfer: TransferId
    # "save", "load", "pull", "send"
    what: str
    keys: tuple[RequestKey, ...]
    # With None every byte is where it belongs. Else the destination holds nothing of use, and the source is untouched.
    error: str | None = None
    # what the transfer took; outcomes that differ in that alone are equal
    num_bytes: int = field(default=0, compare=False)
    seconds: float = field(default=0.0, compare=False)


Done = Callable[[Outcome], None]


class Completions:
    """An instance has one for all of its transports. `wake` is called for each report, on the thread that reports."""

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake = wake

    def post(self, done: Done, outcome: Outcome) -> None:
        self.call(partial(done, outcome))

    def call(self, what: Callable[[], object]) -> None:
        """Has `what` called by `run`. Any thread may ask for that."""
        self._waiting.put(what)
        self._wake()

    def run(self, timeout_s: float = 0.0) -> int:
        """Calls what is waiting, and returns the number of calls. It waits for one for `timeout_s` at most."""
        num_run = 0
        while True:
            try:
                what = self._waiting.get(timeout=timeout_s)
            except queue.Empty:
                return num_run
            what()
            num_run += 1
            timeout_s = 0.0


class TransferIds:
    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self._numbers = itertools.count(1)

    def next(self) -> TransferId:
        return TransferId(self.epoch, next(self._numbers))
