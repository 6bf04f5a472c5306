"""Where transfers report that they have ended, and others that work on threads of their own.

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
    # of the process that counts
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
    # None: every byte is where it belongs. Else the destination holds nothing of use, and the source is untouched.
    error: str | None = None
    # what it took; two outcomes that say the same are equal all the same
    num_bytes: int = field(default=0, compare=False)
    seconds: float = field(default=0.0, compare=False)


Done = Callable[[Outcome], None]


class Completions:
    """One for all transports of an instance. `wake` is called on the thread of whoever reports, once for each."""

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake = wake

    def post(self, done: Done, outcome: Outcome) -> None:
        self.call(partial(done, outcome))

    def call(self, what: Callable[[], object]) -> None:
        """From any thread: has it called by `run`."""
        self._waiting.put(what)
        self._wake()

    def run(self, timeout_s: float = 0.0) -> int:
        """Calls what is waiting, after at most `timeout_s` if nothing is, and returns how many that were."""
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
