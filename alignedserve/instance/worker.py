"""What both kinds of instances share, as their driver sees it: live that is a loop on a thread (`loop.py`), in
simulation a clock.

Everything happens in one thread: orders and outcomes of copies are taken, iterations begun and finished. Copies of KV
run beside that, and grammars are compiled beside it (`compiling.py`). Nothing that belongs to a copy is freed before
its outcome is there.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor as Threads
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from alignedserve.instance.compiling import Compiling
from alignedserve.instance.executor import Executor, Iteration, Transfers
from alignedserve.instance.stopwatch import Stopwatch
from alignedserve.protocol.messages import AnyMessage, InstanceLimits, Moved
from alignedserve.transport.completions import Done, Outcome
from alignedserve.transport.runs import Pairs
from alignedserve.types import RequestKey

# How many seconds at a time the worker waits for copies that were told to stop; each ends by itself, at its deadline
# at the latest.
DRAIN_STEP_S = 1.0


class Step(Protocol):
    """An iteration between its two halves."""

    @property
    def iteration(self) -> Iteration | None:
        """The iteration that the engine computes, None if it computes nothing."""


AnyStep = TypeVar("AnyStep", bound=Step)


class Worker(ABC, Generic[AnyStep]):
    def __init__(
        self,
        engine: Executor,
        transfers: Transfers,
        clock: Callable[[], float] = time.monotonic,
        threads: Threads | None = None,
    ) -> None:
        """`threads`: the executor on which grammars are compiled; None for one of the worker's own."""
        self.engine = engine
        self.transfers = transfers
        self._clock = clock
        self._stopwatch = Stopwatch(clock)
        self._compiling = Compiling(transfers.completions, threads)
        # The number of copies under way of each request.
        self._num_copies: Counter[RequestKey] = Counter()
        # The bytes and seconds of copies since the last report, by kind of copy.
        self._moved: dict[str, Moved] = {}
        # These are sent after the next report.
        self._outbox: list[AnyMessage] = []
        # The longest that the next step may wait for a wake, in seconds; None for as long as it takes.
        self.patience_s: float | None = None

    @property
    @abstractmethod
    def limits(self) -> InstanceLimits:
        """The limits of its schedule."""

    # ---- for its driver ---------------------------------------------------------------------------------------------

    @abstractmethod
    def on(self, order: AnyMessage) -> None:
        """Takes an order; `begin` acts on it."""

    def take_outcomes(self) -> list[AnyMessage]:
        """Takes the outcomes of copies, before an iteration. Returns the messages to the router that should not wait
        for the iteration's end, since others go on with what was copied."""
        self.transfers.completions.run()
        return []

    @abstractmethod
    def begin(self) -> AnyStep:
        """Does the first half of an iteration: plans it, starts copies, launches what is to be computed."""

    @abstractmethod
    def finish(self, step: AnyStep) -> tuple[list[AnyMessage], bool]:
        """Does the second half, once that is computed. Returns the messages to the router, in order, and whether to go
        on at once or after a wake."""

    def step(self) -> tuple[list[AnyMessage], bool]:
        """Runs a whole iteration, for drivers that need not send anything before its end."""
        urgent = self.take_outcomes()
        messages, goes_on = self.finish(self.begin())
        return urgent + messages, goes_on

    @abstractmethod
    def check(self) -> None:
        """Raises unless its counts are right; may be called at any time."""

    @abstractmethod
    def check_idle(self) -> None:
        """Raises if anything is left of any request."""

    @abstractmethod
    def drop_orders(self) -> None:
        """Forgets all that needs the pool's memory. Copies have ended when it returns. Safe to repeat."""

    @abstractmethod
    def drop_all(self) -> None:
        """Forgets everything and reports nothing, because the router that ordered it is gone. Safe to repeat."""

    def use_pool(self, pool: Any) -> None:
        """Uses this memory as the pool's from here on, and drops earlier orders."""
        self.leave_pool()
        self.transfers.use_pool(pool)

    def leave_pool(self) -> None:
        """Releases the pool's memory. Safe to repeat."""
        self.drop_orders()
        self.transfers.leave_pool()

    def close(self) -> None:
        """Ends all threads. Safe to repeat."""
        self.leave_pool()
        self._compiling.close()
        self.transfers.close()

    # ---- for its subclasses -----------------------------------------------------------------------------------------

    def _load(self, key: RequestKey, pairs: Pairs, done: Done, is_urgent: bool = False) -> None:
        """`done` is called in one half of an iteration or the other, or while orders are dropped."""
        self.transfers.load(key, pairs, self._counted([key], done), is_urgent)

    def _save(
        self, key: RequestKey, pairs: Pairs, num_empty: int, done: Done, is_urgent: bool = False
    ) -> None:
        self.transfers.save(key, pairs, num_empty, self._counted([key], done), is_urgent)

    def _counted(self, keys: Sequence[RequestKey], done: Done) -> Done:
        self._num_copies.update(keys)
        return partial(self._copied, done)

    def _copied(self, done: Done, outcome: Outcome) -> None:
        self._num_copies.subtract(outcome.keys)
        if outcome.error is None:
            moved = self._moved.setdefault(outcome.what, Moved(outcome.what, 0, 0.0))
            moved.num_bytes += outcome.num_bytes
            moved.seconds += outcome.seconds
        for key in outcome.keys:
            if not self._num_copies[key]:
                del self._num_copies[key]
        done(outcome)

    def _stop_copies(self) -> None:
        """Stops all copies, and returns when none is under way."""
        self.transfers.cut()
        for key in self._num_copies:
            self.transfers.abandon(key)
        while self._num_copies:
            self.transfers.completions.run(DRAIN_STEP_S)

    def _check_blocks(self, num_free_planned: int) -> None:
        if num_free_planned != self.engine.num_free_blocks:
            raise RuntimeError(
                f"the schedule counts {num_free_planned} free blocks, the engine {self.engine.num_free_blocks}"
            )
