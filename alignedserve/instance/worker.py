"""The common part of prefill and decode workers. The driver is a loop on a thread (`loop.py`), or a clock in
simulation.

All of it runs in one thread: it takes orders and outcomes of copies, and begins and finishes iterations. Copies of KV
and the compilation of grammars (`compiling.py`) run beside that. Nothing that a copy uses is freed before the copy's
outcome.
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

# Seconds per wait for stopped copies. Each ends on its own, at its deadline at the latest.
DRAIN_STEP_S = 1.0


class Step(Protocol):
    """An iteration between its two halves."""

    @property
    def iteration(self) -> Iteration | None:
        """The iteration that the engine computes; None if there is nothing to compute."""


AnyStep = TypeVar("AnyStep", bound=Step)


class Worker(ABC, Generic[AnyStep]):
    def __init__(
        self,
        engine: Executor,
        transfers: Transfers,
        clock: Callable[[], float] = time.monotonic,
        threads: Threads | None = None,
    ) -> None:
        """`threads` compile grammars; None gives the worker its own."""
        self.engine = engine
        self.transfers = transfers
        self._clock = clock
        self._stopwatch = Stopwatch(clock)
        self._compiling = Compiling(transfers.completions, threads)
        # Running copies per request.
        self._num_copies: Counter[RequestKey] = Counter()
        # Bytes and seconds of copies since the last report, by kind.
        self._moved: dict[str, Moved] = {}
        # Messages to send after the next report.
        self._outbox: list[AnyMessage] = []
        # The longest that the next step may wait for a wake, in seconds; None for any time.
        self.patience_s: float | None = None

    @property
    @abstractmethod
    def limits(self) -> InstanceLimits:
        """The limits of its schedule."""

    # ---- for its driver ---------------------------------------------------------------------------------------------

    @abstractmethod
    def on(self, order: AnyMessage) -> None:
        """Takes an order, which `begin` then acts on."""

    def take_outcomes(self) -> list[AnyMessage]:
        """Takes the outcomes of copies before an iteration. Returns messages to the router that must not wait for the
        iteration's end, because other processes need the copied data."""
        self.transfers.completions.run()
        return []

    @abstractmethod
    def begin(self) -> AnyStep:
        """Does the first half of an iteration: plans it, starts copies, launches the computation."""

    @abstractmethod
    def finish(self, step: AnyStep) -> tuple[list[AnyMessage], bool]:
        """Does the second half, after the computation. Returns the messages to the router in order, and whether to
        continue immediately or after a wake."""

    def step(self) -> tuple[list[AnyMessage], bool]:
        """Runs a whole iteration, for drivers that send nothing before its end."""
        urgent = self.take_outcomes()
        messages, goes_on = self.finish(self.begin())
        return urgent + messages, goes_on

    @abstractmethod
    def check(self) -> None:
        """Raises if its counts are wrong. May be called at any time."""

    @abstractmethod
    def check_idle(self) -> None:
        """Raises if anything is left of any request."""

    @abstractmethod
    def drop_orders(self) -> None:
        """Forgets everything that needs the pool's memory. Its copies have ended when this returns. Safe to repeat."""

    @abstractmethod
    def drop_all(self) -> None:
        """Forgets everything without a report, because the router is gone. Safe to repeat."""

    def use_pool(self, pool: Any) -> None:
        """Uses this memory as the pool's from now on, and drops earlier orders."""
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
        """`done` is called in either half of an iteration, or while orders are dropped."""
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
        """Stops all copies, and returns when none is running."""
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
