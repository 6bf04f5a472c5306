"""Where transfers report that they have ended.

Transfers run on threads of their own; an instance's loop runs on one thread and owns everything that they are about.
So an outcome waits in `Completions` until the loop picks it up, at an iteration boundary: then `done` is called, in the
loop's thread. Every transfer that was started ends with exactly one outcome, also if it is abandoned, if its deadline
passes, or if its link breaks; only then do its blocks belong to their owner again.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable
from dataclasses import dataclass, field

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
    # "save", "load", "pull", "lend"
    what: str
    keys: tuple[RequestKey, ...]
    # None: every byte is where it belongs. Else the destination holds nothing of use, and the source is untouched.
    error: str | None = None
    # what it took; two outcomes that say the same are equal all the same
    num_bytes: int = field(default=0, compare=False)
    seconds: float = field(default=0.0, compare=False)


Done = Callable[[Outcome], None]


class Completions:
    """One for all transports of an instance. `wake` is called on the transfer's thread, once for every outcome."""

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        self._waiting: queue.SimpleQueue[tuple[Done, Outcome]] = queue.SimpleQueue()
        self._wake = wake

    def post(self, done: Done, outcome: Outcome) -> None:
        self._waiting.put((done, outcome))
        self._wake()

    def run(self, timeout_s: float = 0.0) -> int:
        """Calls what is waiting, after at most `timeout_s` if nothing is, and returns how many that were."""
        num_run = 0
        while True:
            try:
                done, outcome = self._waiting.get(timeout=timeout_s)
            except queue.Empty:
                return num_run
            done(outcome)
            num_run += 1
            timeout_s = 0.0


class TransferIds:
    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self._numbers = itertools.count(1)

    def next(self) -> TransferId:
        return TransferId(self.epoch, next(self._numbers))
