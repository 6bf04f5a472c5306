"""Where transfers, and other work on threads of its own, report that they have ended.

Transfers run on threads of their own; an instance's loop runs on one thread and owns all blocks and requests. So an
outcome waits in `Completions` until the loop picks it up, at an iteration boundary: then `done` is called, in the
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
    # The epoch of the process that gives the numbers.
    epoch: Epoch
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


@dataclass(frozen=True)
class Outcome:
    transfer: TransferId
    # "save", "load", "pull" or "send".
    what: str
    keys: tuple[RequestKey, ...]
    # None: every byte has arrived. Otherwise the content of the destination is undefined, and the source is unchanged.
    error: str | None = None
    # The bytes and the time of the transfer; outcomes that differ only in these are equal.
    num_bytes: int = field(default=0, compare=False)
    seconds: float = field(default=0.0, compare=False)
    # Whether a pull failed because the sender does not have one of the requests staged: the link works.
    is_denied: bool = False


Done = Callable[[Outcome], None]


class Completions:
    """The outcomes that wait for the loop. An instance has one for all of its transports. `wake` is called for each
    report, on the thread that reports."""

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake = wake

    def post(self, done: Done, outcome: Outcome) -> None:
        self.call(partial(done, outcome))

    def call(self, what: Callable[[], object]) -> None:
        """Makes `run` call `what`. Any thread may call this."""
        self._waiting.put(what)
        self._wake()

    def run(self, timeout_s: float = 0.0) -> int:
        """Makes the calls that are waiting, and returns their number. If there are none it waits for one, for
        `timeout_s` at most."""
        if not timeout_s and self._waiting.empty():
            # Nothing waits before most iterations, and an exception takes longer than this.
            return 0
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
