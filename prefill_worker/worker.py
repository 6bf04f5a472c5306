"""A prefill instance: carries out its schedule's plans on the engine, and reports.

A prompt's KV is saved to the pool block by block: columns completed in one iteration are copied during the next. Shared
KV (`instance/prefix_cache.py`) is saved as well, if the pool lacks it. KV that the pool has is loaded only if this
instance lacks it. During the last copy a decode instance may already pull the KV of RT from here (`staging.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor as Threads
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

from msgspec.structs import replace

from alignedserve.engine.outputs import TokenOutput
from alignedserve.engine.request import Request, Status
from alignedserve.instance.copies import DRAIN_STEP_S, blocks_with, pairs_of
from alignedserve.instance.executor import Executor, Transfers
from alignedserve.instance.memory import BlockManager
from alignedserve.instance.requests import limits_of
from alignedserve.instance.worker import Step, Worker
from alignedserve.prefill_worker.boundary import PrefillPlan
from alignedserve.prefill_worker.schedule import PrefillSchedule
from alignedserve.prefill_worker.scheduled_request import PromptState, ScheduledRequest
from alignedserve.prefill_worker.staging import Staging
from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    Failed,
    ForgetAll,
    Gone,
    Prefill,
    PrefillReport,
    Stage,
    Unstage,
    Work,
)
from alignedserve.scheduling.policies import Policy
from alignedserve.timing.estimate import Estimate
from alignedserve.transport.completions import Outcome
from alignedserve.transport.runs import Pairs
from alignedserve.types import RequestKey


@dataclass(eq=False)
class Prompt:
    work: Work
    request: Request
    scheduled: ScheduledRequest
    # Columns with KV in the pool or on the way to it.
    num_saved_columns: int
    # Tokens with KV that it shared here when it started.
    num_shared: int
    # Columns that it had passed with the KV in the pool. It has no blocks for them in sliding groups.
    num_passed: int
    # The message to send when an aborted prompt leaves.
    last_message: Failed | Gone | None = None

    @property
    def key(self) -> RequestKey:
        return self.work.request.key


class PrefillWorker(Worker):
    schedule: PrefillSchedule
    _requests: dict[RequestKey, Prompt]
    _report: PrefillReport

    def __init__(
        self,
        engine: Executor,
        transfers: Transfers,
        policy: Policy | None = None,
        estimate: Estimate | None = None,
        clock: Callable[[], float] = time.monotonic,
        threads: Threads | None = None,
        enable_prefix_caching: bool = False,
        memory: BlockManager | None = None,
    ) -> None:
        """`memory`: that of the engine's last worker, if it had one."""
        # Blocks that a prompt passes during its computation are being saved to the pool, and are not freed.
        memory = memory or BlockManager(engine.limits.num_blocks, engine.span)
        memory.count_as(engine.span, counts_once=False)
        super().__init__(engine, transfers, memory, clock, threads, enable_prefix_caching)
        limits = replace(limits_of(engine, memory.span), saves_whole=True)
        self.schedule = PrefillSchedule(
            limits, transfers.staging_share, policy, estimate, memory, self.prompts.prefix_cache
        )
        self._staging = Staging(self.schedule, transfers, self.copies, self)
        self._report = PrefillReport.empty()

    # ---- orders -----------------------------------------------------------------------------------------------------

    def on(self, order: AnyMessage) -> None:
        match order:
            case Prefill():
                for work in order.works:
                    self._staging.when_gone(work.request.key, partial(self._prefill, work))
            case Stage():
                for work in order.works:
                    self._staging.when_gone(work.request.key, partial(self.schedule.stage, [work]))
            case Unstage():
                for key in order.keys:
                    if not self._staging.drop(key):
                        self.schedule.stages.unstage(key)
            case Abort():
                for key in order.keys:
                    self._abort(key)
            case ForgetAll():
                self.prompts.distrust_all(order.era)
            case _:
                raise RuntimeError(f"{type(order).__name__}: no order for a prefill instance")

    def _prefill(self, work: Work) -> None:
        self._prepare(work, partial(self.schedule.prefill, [work]))

    def _abort(self, key: RequestKey) -> None:
        self.prompts.forget(key)
        if key in self._requests:
            self._drop(self._requests[key], Gone([key]))
        elif not self._staging.drop(key, Gone([key])):
            self.schedule.abort(key)
            self._outbox.append(Gone([key]))

    def drop_orders(self) -> None:
        self.prompts.forget_waiting()
        for key in self.schedule.drop_waiting():
            if key in self._requests:
                self._drop(self._requests[key], None)
            else:
                self._staging.drop(key)
        self.copies.stop()
        while len(self._staging):
            self.transfers.completions.run(DRAIN_STEP_S)

    def _drop_rest(self) -> None:
        self._report = PrefillReport.empty()

    def check_idle(self) -> None:
        super().check_idle()
        if num_left := len(self._staging):
            raise RuntimeError(f"idle, but {num_left} requests are staged, or on their way to it")

    # ---- iterations -------------------------------------------------------------------------------------------------

    def take_outcomes(self) -> list[AnyMessage]:
        # Decode instances may be waiting for saved or staged KV.
        return super().take_outcomes() + self._take_messages(0.0)

    def _carry_out(self, plan: PrefillPlan) -> Sequence[tuple[Request, int]]:
        for key in plan.preempted:
            self._preempt(self._requests[key])
        for work in plan.new_prompts:
            self._start(work)
        for work in plan.loads:
            self._load_cached(work)
        for work in plan.stages:
            self._staging.start(work)
        if not plan.chunks:
            self._stopwatch.stop()
        return [(self._requests[key].request, count) for key, count in plan.chunks]

    def _start(self, work: Work) -> None:
        scheduled = self.schedule.prompts.started[work.request.key]
        request = self.prompts.start(work, scheduled)
        num_shared = self.prompts.num_shared(work.request.key)
        num_saved = work.num_cached // self.engine.format.block_size
        num_passed = self.memory.span.num_passed(work.num_cached)
        self._requests[work.request.key] = Prompt(work, request, scheduled, num_saved, num_shared, num_passed)
        if work.num_cached <= num_shared:
            self.engine.join(request)
            if request.num_computed:
                self._progressed(request)

    def _take_outputs(self, step: Step, outputs: Sequence[TokenOutput]) -> None:
        self.schedule.forecast.took(*self._stopwatch.lap())
        for news, output in zip_longest(step.news, outputs):
            self.prompts.take_output(output, news)
        self._report.news += step.news
        for key, count in step.plan.chunks:
            self.schedule.prompts.computed(key, count)
            self._after_chunk(self._requests[key])

    def _finished(self, step: Step) -> list[AnyMessage]:
        # Copies that ended immediately are reported together with this iteration's results.
        self.transfers.completions.run()
        return self._take_messages(self._clock() - step.begun_s)

    def _after_chunk(self, prompt: Prompt) -> None:
        request = prompt.request
        self.prompts.computed([request])
        if request.status is Status.HELD:
            self._drop(prompt, None)  # The request ended with its first token, or with its embedding
        elif prompt.scheduled.state is PromptState.SAVING:
            self.engine.part(request)
            self._hold(prompt)
            self._save_columns(prompt, self.memory.span.num_columns(request.num_computed))
        else:
            self._progressed(request)
            self._save_columns(prompt, request.num_computed // self.engine.format.block_size)

    def _hold(self, prompt: Prompt) -> None:
        """Lets decode instances pull RT from here."""
        if prompt.work.deadlines.is_rt:
            blocks = blocks_with(self.memory, prompt.request.held, prompt.request.num_computed)
            if self._staging.hold(prompt.key, blocks):
                self._report.held.append(prompt.key)

    # ---- copies -----------------------------------------------------------------------------------------------------

    def _load_cached(self, work: Work) -> None:
        prompt = self._requests[work.request.key]
        first, end = (
            prompt.num_shared // self.engine.format.block_size,
            self.memory.span.num_columns(work.num_cached),
        )
        pairs = self._pairs(prompt, first, end)
        self.copies.load(prompt.key, pairs, self._loaded, work.deadlines.is_rt)

    def _loaded(self, outcome: Outcome) -> None:
        prompt = self._requests[outcome.keys[0]]
        if outcome.error is not None:
            self._drop(prompt, Failed(prompt.key, "load", outcome.error, outcome.wrong_block))
        elif prompt.scheduled.state is PromptState.ABORTED:
            self._leave_if_done(prompt)
        else:
            self.schedule.prompts.loaded(prompt.key)
            self.engine.join(prompt.request)

    def _save_columns(self, prompt: Prompt, end: int) -> None:
        """Saves the columns before column `end` that the pool lacks. Does nothing for an embedding, which has no pool
        blocks."""
        if prompt.work.request.is_embedding:
            return
        pairs = self._pairs(prompt, prompt.num_saved_columns, end)
        if pairs:
            prompt.num_saved_columns = end
            num_empty = max(end * self.engine.format.block_size - prompt.request.num_computed, 0)
            self.copies.save(prompt.key, pairs, num_empty, self._saved, prompt.work.deadlines.is_rt)

    def _saved(self, outcome: Outcome) -> None:
        prompt = self._requests[outcome.keys[0]]
        if outcome.error is not None:
            self._drop(prompt, Failed(prompt.key, "save", outcome.error))
        else:
            self._leave_if_done(prompt)

    def _preempt(self, prompt: Prompt) -> None:
        self.engine.part(prompt.request)
        num_computed = prompt.request.num_computed
        # The pool has what was loaded from it. Its last block may hold more tokens than this instance has been told.
        if num_computed > prompt.work.num_cached:
            self._save_columns(prompt, self.memory.span.num_columns(num_computed))
        self._leave_if_done(prompt)

    def _preempted(self, prompt: Prompt) -> None:
        self.schedule.prompts.preempted(prompt.key)
        self.engine.release(prompt.request)
        self.prompts.preempted(prompt.request)
        del self._requests[prompt.key]

    def _pairs(self, prompt: Prompt, first: int, end: int) -> Pairs:
        return pairs_of(self.memory, prompt.request.held, prompt.work.blocks, first, end, prompt.num_passed)

    # ---- what staging says ------------------------------------------------------------------------------------------

    def staged(self, key: RequestKey) -> None:
        self._report.staged.append(key)

    def let_go(self, key: RequestKey) -> None:
        self._leave_if_done(self._requests[key])

    def gone(self, last_message: Failed | Gone) -> None:
        self._outbox.append(last_message)

    # ---- a prompt's end ---------------------------------------------------------------------------------------------

    def _drop(self, prompt: Prompt, last_message: Failed | Gone | None) -> None:
        """Stops work on the prompt. It leaves when no copy is running, and its last message is then sent."""
        if prompt.scheduled.state is not PromptState.ABORTED:
            prompt.last_message = last_message
            self.schedule.abort(prompt.key)
            if prompt.request.status is Status.RUNNING:
                self.engine.part(prompt.request)
            self.transfers.abandon(prompt.key)
            self._staging.drop(prompt.key)
        elif isinstance(last_message, Gone):
            prompt.last_message = last_message
        self._leave_if_done(prompt)

    def _leave_if_done(self, prompt: Prompt) -> None:
        if prompt.key in self.copies:
            return
        if prompt.scheduled.state is PromptState.SAVING:
            self._report.saved.append((prompt.key, prompt.request.num_computed))
            self.schedule.prompts.saved(prompt.key)
        state = prompt.scheduled.state
        if state is PromptState.PREEMPTING:
            self._preempted(prompt)
        elif state in (PromptState.SAVED, PromptState.ABORTED) and prompt.key not in self._staging:
            self._leave(prompt)

    def _leave(self, prompt: Prompt) -> None:
        if prompt.scheduled.state is PromptState.ABORTED:
            self._outbox += [prompt.last_message] if prompt.last_message else []
            self.schedule.prompts.saved(prompt.key)
        self.engine.release(prompt.request)
        self.prompts.left(prompt.key)
        del self._requests[prompt.key]

    def _take_messages(self, duration_s: float) -> list[AnyMessage]:
        has_news = self._has_news(self.memory.num_free)
        report = [self._take_report(duration_s)] if has_news else []
        return report + self._take_outbox()
