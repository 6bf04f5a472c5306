"""Where transfers, and other work on threads, report that they have ended.

Transfers run on threads, while an instance's loop owns all blocks and requests on one thread. So an outcome waits in
`Completions` until the loop takes it at an iteration boundary and calls `done` on its own thread.

Every started transfer ends with exactly one outcome, even if it is abandoned, exceeds its deadline or loses its
connection. Only then do its blocks belong to their owner again.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from alignedserve.types import Epoch, PoolBlockId, RequestKey


class TransferId(msgspec.Struct, frozen=True, array_like=True):
    # Epoch of the process that assigns the numbers.
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
    # None if every byte has arrived. Otherwise the destination's content is undefined, and the source is unchanged.
    error: str | None = None
    # Bytes and duration of the transfer. They are not compared.
    num_bytes: int = field(default=0, compare=False)
    seconds: float = field(default=0.0, compare=False)
    # Whether the pull failed only because the sender has not staged one of the requests. The link works.
    is_denied: bool = False
    # The blocks of the pool that a load has compared with their checksums, and those that had changed.
    num_checked: int = field(default=0, compare=False)
    num_changed: int = field(default=0, compare=False)
    # The first block of the pool with bytes other than those saved. The load has failed then.
    wrong_block: PoolBlockId | None = None


Done = Callable[[Outcome], None]


class Completions:
    """Outcomes that wait for the loop. An instance has one queue for all transports. `wake` is called for each report,
    on the reporting thread."""

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake = wake

    def post(self, done: Done, outcome: Outcome) -> None:
        self.call(partial(done, outcome))

    def call(self, what: Callable[[], object]) -> None:
        """Has `run` call `what`. Any thread may call this."""
        self._waiting.put(what)
        self._wake()

    def run(self, timeout_s: float = 0.0) -> int:
        """Makes the waiting calls and returns their number. If there are none, it waits up to `timeout_s` for one."""
        if not timeout_s and self._waiting.empty():
            # Usually nothing waits, and this is faster than an exception.
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
