"""What both kinds of instances are to what drives them: live a loop on a thread (`loop.py`), in simulation a clock.

Everything happens in one thread: orders are taken, outcomes of copies picked up, iterations begun and finished. Copies
of KV go on beside that, and so are grammars compiled (`compiling.py`). Nothing that belongs to a copy is freed before
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

# Copies that were told to stop are waited for in such steps; each ends by itself, at its deadline at the latest.
DRAIN_STEP_S = 1.0


class Step(Protocol):
    """An iteration between its halves."""

    @property
    def iteration(self) -> Iteration | None:
        """What is being computed, if anything is."""


AnyStep = TypeVar("AnyStep", bound=Step)


class Worker(ABC, Generic[AnyStep]):
    def __init__(
        self,
        engine: Executor,
        transfers: Transfers,
        clock: Callable[[], float] = time.monotonic,
        threads: Threads | None = None,
    ) -> None:
        """`threads`: where grammars are compiled, if not on the worker's own."""
        self.engine = engine
        self.transfers = transfers
        self._clock = clock
        self._stopwatch = Stopwatch(clock)
        self._compiling = Compiling(transfers.completions, threads)
        # copies under way of each request
        self._num_copies: Counter[RequestKey] = Counter()
        # since the last report, by what it was
        self._moved: dict[str, Moved] = {}
        # to be sent after the next report
        self._outbox: list[AnyMessage] = []
        # where the next step needs a wake, how long it may take to come; None: however long
        self.patience_s: float | None = None

    @property
    @abstractmethod
    def limits(self) -> InstanceLimits:
        """Its schedule's."""

    # ---- for what drives it -----------------------------------------------------------------------------------------

    @abstractmethod
    def on(self, order: AnyMessage) -> None:
        """Takes an order. `begin` acts on it."""

    @abstractmethod
    def begin(self) -> AnyStep:
        """The first half of an iteration: plans it, starts copies, launches what is to be computed."""

    @abstractmethod
    def finish(self, step: AnyStep) -> tuple[list[AnyMessage], bool]:
        """The second half, once that is computed. What the router has to know, in order; and whether to go on at once,
        or after a wake."""

    def step(self) -> tuple[list[AnyMessage], bool]:
        """A whole iteration."""
        return self.finish(self.begin())

    @abstractmethod
    def check(self) -> None:
        """Its counts are right; holds at any time."""

    @abstractmethod
    def check_idle(self) -> None:
        """Nothing is left of any request."""

    @abstractmethod
    def drop_orders(self) -> None:
        """Forgets all that needs the pool's memory. Copies have ended when it returns. Safe to repeat."""

    @abstractmethod
    def drop_all(self) -> None:
        """Forgets everything, without a word: the router that ordered it is gone. Safe to repeat."""

    def use_pool(self, pool: Any) -> None:
        """The pool's memory from here on. Orders before this are void."""
        self.leave_pool()
        self.transfers.use_pool(pool)

    def leave_pool(self) -> None:
        """Lets go of the pool's memory. Safe to repeat."""
        self.drop_orders()
        self.transfers.leave_pool()

    def close(self) -> None:
        """No thread is left. Safe to repeat."""
        self.leave_pool()
        self._compiling.close()
        self.transfers.close()

    # ---- for the kinds ----------------------------------------------------------------------------------------------

    def _load(self, key: RequestKey, pairs: Pairs, done: Done, is_urgent: bool = False) -> None:
        """`done` is called in one half of an iteration or the other, or while orders are dropped."""
        self.transfers.load(key, pairs, self._counted([key], done), is_urgent)

    def _save(self, key: RequestKey, pairs: Pairs, done: Done, is_urgent: bool = False) -> None:
        self.transfers.save(key, pairs, self._counted([key], done), is_urgent)

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
        """Returns when none is under way."""
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
