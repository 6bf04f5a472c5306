"""What both kinds of instances are to the loop that drives them (`loop.py`).

Everything happens on the loop's thread: orders are taken, outcomes of copies picked up, iterations run. Copies of KV
run on threads of their own beside that, and so are grammars compiled (`compiling.py`). Nothing that belongs to a copy
is freed before its outcome is there.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from alignedserve.engine.engine import Engine
from alignedserve.instance.compiling import Compiling
from alignedserve.instance.config import TransferConfig
from alignedserve.instance.stopwatch import Stopwatch
from alignedserve.messages import AnyMessage, InstanceLimits, Moved
from alignedserve.transport.channel import Identity
from alignedserve.transport.completions import Completions, Done, Outcome
from alignedserve.transport.mover import Mover, Pairs
from alignedserve.types import Epoch, RequestKey

# Copies that were told to stop are waited for in such steps; each ends by itself, at its deadline at the latest.
DRAIN_STEP_S = 1.0


class Worker(ABC):
    def __init__(
        self,
        engine: Engine,
        epoch: Epoch,
        wake: Callable[[], object] = lambda: None,
        transfers: TransferConfig | None = None,
    ) -> None:
        """`wake` is called, on another thread, when `step` has something to do again."""
        self.engine = engine
        self.transfers = transfers or TransferConfig()
        self._epoch = epoch
        self._clock = time.monotonic
        self._stopwatch = Stopwatch(self._clock)
        self._completions = Completions(wake)
        self._compiling = Compiling(self._completions)
        # copies under way of each request
        self._num_copies: Counter[RequestKey] = Counter()
        self._pool_mover: Mover | None = None
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

    # ---- for the loop -----------------------------------------------------------------------------------------------

    @abstractmethod
    def on(self, order: AnyMessage) -> None:
        """Takes an order. `step` acts on it."""

    @abstractmethod
    def step(self) -> tuple[list[AnyMessage], bool]:
        """One iteration. What the router has to know, in order; and whether to go on at once, or after a wake."""

    @abstractmethod
    def drop_orders(self) -> None:
        """Forgets all that needs the pool's memory. Copies have ended when it returns. Safe to repeat."""

    @abstractmethod
    def drop_all(self) -> None:
        """Forgets everything, without a word: the router that ordered it is gone. Safe to repeat."""

    def use_pool(self, pool: NDArray[np.uint8]) -> None:
        """The pool's memory from here on. Orders before this are void."""
        self.leave_pool()
        self._pool_mover = Mover(
            self.engine.cache.blocks,
            pool,
            self._epoch,
            self._completions,
            quick_bytes=self.transfers.quick_bytes,
        )

    def leave_pool(self) -> None:
        """Lets go of the pool's memory. Safe to repeat."""
        self.drop_orders()
        if self._pool_mover is not None:
            self._pool_mover.close()
            self._pool_mover = None

    def open_transport(self, me: Identity) -> str:
        """What it takes to move KV between instances, if that is not the pool's memory. Returns the address of what is
        staged here, if there is one."""
        return ""

    def close(self) -> None:
        """No thread is left. Safe to repeat."""
        self.leave_pool()
        self._compiling.close()

    # ---- for the kinds ----------------------------------------------------------------------------------------------

    @property
    def _mover(self) -> Mover:
        if self._pool_mover is None:
            raise RuntimeError("an order that needs the pool's memory came before UsePool")
        return self._pool_mover

    def _load(self, key: RequestKey, pairs: Pairs, done: Done, is_urgent: bool = False) -> None:
        """`done` is called by `step`, or while orders are dropped."""
        self._mover.load(key, pairs, self._counted([key], done), self.transfers.timeout_s, is_urgent)

    def _save(self, key: RequestKey, pairs: Pairs, done: Done, is_urgent: bool = False) -> None:
        self._mover.save(key, pairs, self._counted([key], done), self.transfers.timeout_s, is_urgent)

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
        for key in self._num_copies:
            self._mover.abandon(key)
        while self._num_copies:
            self._completions.run(DRAIN_STEP_S)

    def _check_blocks(self, num_free_planned: int) -> None:
        if num_free_planned != self.engine.num_free_blocks:
            raise RuntimeError(
                f"the schedule counts {num_free_planned} free blocks, the engine {self.engine.num_free_blocks}"
            )
