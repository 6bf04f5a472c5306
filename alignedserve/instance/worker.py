"""The common part of prefill and decode workers. The driver is a loop on a thread (`loop.py`), or a clock in
simulation.

All of it runs in one thread: it takes orders and outcomes of copies, and begins and finishes iterations. Copies of KV
and the compilation of grammars (`compiling.py`) run beside that. Nothing that a copy uses is freed before the copy's
outcome.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor as Threads
from typing import Any, Protocol

import msgspec

from alignedserve.engine.outputs import TokenOutput
from alignedserve.engine.request import Request
from alignedserve.instance.compiling import Compiling
from alignedserve.instance.copies import RunningCopies
from alignedserve.instance.executor import Executor, Iteration, Transfers
from alignedserve.instance.iteration_times import IterationForecast, Stopwatch
from alignedserve.instance.memory import BlockManager
from alignedserve.instance.prefix_cache import PrefixCache
from alignedserve.instance.prompts import Prompts
from alignedserve.instance.requests import coming_news, key_of
from alignedserve.protocol.messages import (
    AnyMessage,
    DecodeReport,
    InstanceLimits,
    NewTokens,
    PrefillReport,
    Work,
)
from alignedserve.types import RequestKey


class Step(msgspec.Struct):
    """An iteration between its two halves. A struct, because it is faster to create than a dataclass."""

    begun_s: float
    # The schedule's plan: a PrefillPlan or a DecodePlan.
    plan: Any
    # The iteration that the engine computes; None if there is nothing to compute.
    iteration: Iteration | None = None
    # The reports of the requests that get a token, without the token.
    news: list[NewTokens] = []
    # On instances that decode: the requests with prompt tokens in this iteration.
    prompts: list[RequestKey] = []
    # See DecodeReport.
    is_mixed: bool = False
    scheduling_s: float | None = None


class Schedule(Protocol):
    """Decides what the instance does in its next iteration, and which request has which blocks."""

    limits: InstanceLimits
    forecast: IterationForecast

    def plan(self, now: float) -> Any: ...

    def check(self) -> None: ...

    def check_idle(self) -> None: ...


class Worker(ABC):
    computes_prompts = True
    schedule: Schedule
    # The next report. Events add to it until it is sent.
    _report: PrefillReport | DecodeReport

    def __init__(
        self,
        engine: Executor,
        transfers: Transfers,
        memory: BlockManager,
        clock: Callable[[], float] = time.monotonic,
        threads: Threads | None = None,
        enable_prefix_caching: bool = False,
        rt_only: bool = False,
    ) -> None:
        """`threads` compile grammars; None gives the worker its own. `enable_prefix_caching`: prompts with a common
        prefix reuse KV of earlier ones. `rt_only`: see `PrefixCache`."""
        self.engine = engine
        self.transfers = transfers
        self.memory = memory
        self.copies = RunningCopies(transfers)
        self._clock = clock
        self._stopwatch = Stopwatch(clock)
        self._compiling = Compiling(transfers.completions, threads)
        prefix_cache = PrefixCache(memory, enable_prefix_caching, rt_only)
        self.prompts = Prompts(engine, self._compiling, prefix_cache)
        # Requests that hold blocks.
        self._requests: dict[RequestKey, Any] = {}
        # The counts at the last report: see `_has_news`.
        self._last_levels: object = None
        # Messages to send after the next report.
        self._outbox: list[AnyMessage] = []
        # The longest that the next step may wait for a wake, in seconds; None for any time.
        self.patience_s: float | None = None

    @property
    def limits(self) -> InstanceLimits:
        return self.schedule.limits

    # ---- for its driver ---------------------------------------------------------------------------------------------

    @abstractmethod
    def on(self, order: AnyMessage) -> None:
        """Takes an order, which `begin` then acts on."""

    def take_outcomes(self) -> list[AnyMessage]:
        """Takes the outcomes of copies before an iteration. Returns messages to the router that must not wait for the
        iteration's end, because other processes need the copied data."""
        self.transfers.completions.run()
        return []

    def begin(self) -> Step:
        """Does the first half of an iteration: plans it, starts copies, launches the computation."""
        begun_s = self._clock()
        self._stopwatch.begin()
        step = Step(begun_s, self.schedule.plan(begun_s))
        if work := self._carry_out(step.plan):
            self._launch(step, work)
        return step

    def finish(self, step: Step) -> tuple[list[AnyMessage], bool]:
        """Does the second half, after the computation. Returns the messages to the router in order, and whether to
        continue immediately or after a wake."""
        if step.iteration is not None:
            outputs = self.engine.finish(step.iteration)
            self._stopwatch.engine_ends()
            self._take_outputs(step, outputs)
        return self._finished(step), step.plan.goes_on

    def step(self) -> tuple[list[AnyMessage], bool]:
        """Runs a whole iteration, for drivers that send nothing before its end."""
        urgent = self.take_outcomes()
        messages, goes_on = self.finish(self.begin())
        return urgent + messages, goes_on

    def check(self) -> None:
        """Raises if its counts are wrong. May be called at any time."""
        self.schedule.check()

    def check_idle(self) -> None:
        """Raises if anything is left of any request."""
        self.schedule.check_idle()
        num_left = len(self._requests) + len(self.prompts) + len(self.copies)
        if num_left:
            raise RuntimeError(f"idle, but {num_left} requests and copies are left")

    @abstractmethod
    def drop_orders(self) -> None:
        """Forgets everything that needs the pool's memory. Its copies have ended when this returns. Safe to repeat."""

    def drop_all(self) -> None:
        """Forgets everything without a report, because the router is gone. Safe to repeat."""
        self.drop_orders()
        self._drop_rest()
        self._outbox.clear()
        self.schedule.check_idle()

    @abstractmethod
    def _drop_rest(self) -> None:
        """Forgets what needs no memory of the pool, and what the next report would say."""

    def use_pool(self, pool: Any, checksums: Any = None) -> None:
        """Uses this memory as the pool's from now on, and drops earlier orders."""
        self.leave_pool()
        self.transfers.use_pool(pool, checksums)

    def leave_pool(self) -> None:
        """Releases the pool's memory. Safe to repeat."""
        self.drop_orders()
        self.transfers.leave_pool()

    def close(self) -> None:
        """Ends all threads. Safe to repeat."""
        self.leave_pool()
        self._compiling.close()
        self.transfers.close()

    # ---- what the roles do ------------------------------------------------------------------------------------------

    @abstractmethod
    def _carry_out(self, plan: Any) -> Sequence[tuple[Request, int]]:
        """Starts and ends requests, and starts copies. Returns what the engine computes."""

    def _launch(self, step: Step, work: Sequence[tuple[Request, int]]) -> None:
        self._stopwatch.engine_begins()
        step.scheduling_s = self._stopwatch.scheduling_s
        step.iteration = self.engine.launch(work)
        step.news = coming_news(step.iteration.requests)
        self._report.num_computed += sum([count for _, count in work])

    @abstractmethod
    def _take_outputs(self, step: Step, outputs: Sequence[TokenOutput]) -> None:
        """Completes the reports of the iteration, and ends or saves requests."""

    @abstractmethod
    def _finished(self, step: Step) -> list[AnyMessage]:
        """Does what remains of an iteration, also if nothing was computed. Returns the messages to the router."""

    # ---- for the roles ----------------------------------------------------------------------------------------------

    def _prepare(self, work: Work, then: Callable[[], None]) -> None:
        """Calls `then` when the prompt may start. The next report refuses one that can't be run."""
        if refusal := self.prompts.prepare(work, then):
            self._report.news.append(refusal)

    def _progressed(self, request: Request) -> None:
        """The next report says how far the prompt is."""
        key = key_of(request.request_id)
        self._report.progress.append((key, request.num_computed, self.prompts.num_found(key)))

    def _has_news(self, levels: object) -> bool:
        """Returns whether the next report says anything: something has happened, or these counts have changed."""
        levels = levels, self.copies.num_changed
        report, last, self._last_levels = self._report, self._last_levels, levels
        report.num_asked, report.num_found = self.prompts.prefix_cache.take_counts()
        return report != report.empty() or levels != last

    def _take_report(self, duration_s: float) -> AnyMessage:
        report, self._report = self._report, self._report.empty()
        report.num_free_blocks, report.duration_s = self.memory.num_free, duration_s
        report.pace, report.moved = self.schedule.forecast.pace, self.copies.take_moved()
        return report

    def _take_outbox(self) -> list[AnyMessage]:
        messages, self._outbox = self._outbox, []
        return messages
