"""A prefill instance: carries out its schedule's plans on the engine, and reports.

A prompt's KV is saved to the pool block by block: columns completed in one iteration are copied during the next. Shared
KV (`instance/prefix_cache.py`) is saved as well, because each request has its own copy in the pool. During the last
copy a decode instance may already pull the KV of RT from here (`hand_over.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor as Threads
from dataclasses import dataclass
from functools import partial

import msgspec

from alignedserve.engine.outputs import BrokenLogits, TokenLogprobs, TokenOutput
from alignedserve.engine.request import Request, Status
from alignedserve.instance.columns import blocks_with, pairs_of
from alignedserve.instance.executor import Executor, Iteration, Transfers
from alignedserve.instance.prefix_cache import HashedPrefix, PrefixCache
from alignedserve.instance.preparation import Preparation
from alignedserve.instance.requests import adopt, key_of, limits_of, news_of, says_something
from alignedserve.instance.worker import DRAIN_STEP_S, Worker
from alignedserve.prefill_worker.hand_over import HandOver
from alignedserve.prefill_worker.plan import PrefillPlan
from alignedserve.prefill_worker.schedule import PrefillSchedule
from alignedserve.prefill_worker.staging import Staging
from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    Failed,
    Gone,
    InstanceLimits,
    NewTokens,
    Prefill,
    PrefillReport,
    Stage,
    Unstage,
    Work,
)
from alignedserve.scheduling.policies import Policy
from alignedserve.timing.estimate import Estimate
from alignedserve.transport.completions import Done, Outcome
from alignedserve.transport.runs import Pairs
from alignedserve.types import RequestKey


@dataclass(eq=False)
class Prompt:
    work: Work
    request: Request
    prefix: HashedPrefix
    # Columns with KV in the pool or on the way to it.
    num_saved_columns: int
    # Columns that it had passed when it started. It has no blocks for them in sliding groups.
    num_passed: int
    # Nothing more is computed or saved. It leaves when no copy is running.
    is_dropped: bool = False
    # Nothing is computed until it starts again. It leaves when no copy is running.
    is_preempted: bool = False
    # The message to send when a dropped prompt leaves.
    last_message: Failed | Gone | None = None
    # All of its KV is in the pool, and the next report says so. It leaves when it is not held.
    is_saved: bool = False
    # Log-probabilities of the prompt tokens so far, if the first token is to carry them.
    logprobs: list[TokenLogprobs] | None = None

    @property
    def key(self) -> RequestKey:
        return self.work.request.key

    @property
    def is_computed(self) -> bool:
        return self.request.num_computed == len(self.work.request.prompt) + len(self.work.output)


class Changes(msgspec.Struct):
    """Changes since the last report."""

    news: list[NewTokens] = []
    saved: list[tuple[RequestKey, int]] = []
    staged: list[RequestKey] = []
    progress: list[tuple[RequestKey, int, int]] = []
    num_computed: int = 0
    num_asked: int = 0
    num_found: int = 0
    held: list[RequestKey] = []


class PrefillStep(msgspec.Struct):
    begun_s: float
    plan: PrefillPlan
    iteration: Iteration | None


class PrefillWorker(Worker[PrefillStep]):
    def __init__(
        self,
        engine: Executor,
        transfers: Transfers,
        policy: Policy | None = None,
        estimate: Estimate | None = None,
        clock: Callable[[], float] = time.monotonic,
        threads: Threads | None = None,
        enable_prefix_caching: bool = False,
    ) -> None:
        """`enable_prefix_caching`: prompts with a common prefix reuse KV of earlier ones."""
        super().__init__(engine, transfers, clock, threads)
        # Blocks that a prompt passes during its computation are being saved to the pool, and are not freed.
        engine.keep_window(max_step=0)
        self._prefix_cache = PrefixCache(engine, enable_prefix_caching)
        lookup = self._prefix_cache if enable_prefix_caching else None
        self.schedule = PrefillSchedule(limits_of(engine), transfers.staging_share, policy, estimate, lookup)
        self._staging = Staging(engine, self.schedule, transfers, self)
        self._hand_over = HandOver(self.schedule, transfers, self._let_go)
        # Prompts that hold blocks.
        self._prompts: dict[RequestKey, Prompt] = {}
        self._preparation = Preparation(engine, self._compiling)
        # Log-probabilities of prompts that were preempted halfway, until they start again.
        self._partial_logprobs: dict[RequestKey, list[TokenLogprobs]] = {}
        self._changes = Changes()
        self._last_num_free = -1

    @property
    def limits(self) -> InstanceLimits:
        return self.schedule.limits

    def check(self) -> None:
        self.schedule.check()

    def check_idle(self) -> None:
        self.schedule.check_idle()
        num_left = len(self._prompts) + len(self._staging) + self._num_copies.total()
        if num_left:
            raise RuntimeError(f"idle, but {num_left} requests and copies are left")

    # ---- orders -----------------------------------------------------------------------------------------------------

    def on(self, order: AnyMessage) -> None:
        match order:
            case Prefill():
                for work in order.works:
                    self._when_gone(work.request.key, partial(self._prefill, work))
            case Stage():
                for work in order.works:
                    self._when_gone(work.request.key, partial(self.schedule.stage, [work]))
            case Unstage():
                for key in order.keys:
                    if not (self._hand_over.drop(key) or self._staging.drop(key)):
                        self.schedule.unstage([key])
            case Abort():
                self._abort(order.key)
            case _:
                raise RuntimeError(f"{type(order).__name__}: no order for a prefill instance")

    def _when_gone(self, key: RequestKey, order: Callable[[], None]) -> None:
        """Carries out an order for a request that has left in the router's view, but may still hold blocks."""
        if not self._hand_over.when_gone(key, order):
            self._staging.when_gone(key, order)

    def _prefill(self, work: Work) -> None:
        if refusal := self._preparation.refusal(work):
            self._changes.news.append(refusal)
        else:
            self._preparation.when_ready(work, partial(self.schedule.prefill, [work]))

    def _abort(self, key: RequestKey) -> None:
        self._forget(key)
        if self._staging.drop(key, Gone([key])):
            return
        if self.schedule.abort(key):
            self._drop(self._prompts[key], Gone([key]))
        else:
            self._outbox.append(Gone([key]))

    def _forget(self, key: RequestKey) -> None:
        """Forgets the state of a prompt that holds no blocks."""
        self._preparation.forget(key)
        self._prefix_cache.forget(key)
        self._partial_logprobs.pop(key, None)

    def drop_orders(self) -> None:
        for key in [*self._preparation.keys, *self._partial_logprobs]:
            self._forget(key)
        self._prefix_cache.forget_waiting()
        for key in self.schedule.drop_waiting():
            if not self._staging.drop(key):
                self._drop(self._prompts[key], None)
        self._stop_copies()
        while len(self._staging) or len(self._hand_over):
            self.transfers.completions.run(DRAIN_STEP_S)

    def drop_all(self) -> None:
        self.drop_orders()
        self._outbox.clear()
        self._changes = Changes()
        self.schedule.check_idle()

    # ---- iterations -------------------------------------------------------------------------------------------------

    def take_outcomes(self) -> list[AnyMessage]:
        # Decode instances may be waiting for saved or staged KV.
        return super().take_outcomes() + self._take_messages(0.0)

    def begin(self) -> PrefillStep:
        begun_s = self._clock()
        self._stopwatch.begin()
        plan = self.schedule.plan(begun_s)
        for key in plan.preempted:
            self._preempt(self._prompts[key])
        for work in plan.new_prompts:
            self._start(work)
        for work in plan.loads:
            self._load_cached(work)
        for work in plan.stages:
            self._staging.start(work)
        return PrefillStep(begun_s, plan, self._launch(plan))

    def finish(self, step: PrefillStep) -> tuple[list[AnyMessage], bool]:
        if step.iteration is not None:
            self._computed(step.plan, step.iteration)
        # Copies that ended immediately are reported together with this iteration's results.
        self.transfers.completions.run()
        self._check_blocks(self.schedule.num_free_blocks)
        return self._take_messages(self._clock() - step.begun_s), step.plan.goes_on

    def _start(self, work: Work) -> None:
        key, prefix = work.request.key, self._prefix_cache.start(work)
        request = adopt(self.engine, work, self._preparation.take(key), prefix.num_found)
        num_passed = self.engine.span.num_passed(request.num_computed)
        num_saved = work.num_cached // self.engine.format.block_size
        wants_logprobs = request.params.prompt_logprobs is not None
        logprobs = self._partial_logprobs.pop(key, []) if wants_logprobs else None
        self._prompts[key] = Prompt(work, request, prefix, num_saved, num_passed, logprobs=logprobs)
        if not work.num_cached:
            self.engine.join(request)
        if prefix.num_found:
            self._changes.progress.append((key, prefix.num_found, prefix.num_found))

    def _launch(self, plan: PrefillPlan) -> Iteration | None:
        if not plan.chunks:
            self._stopwatch.stop()
            return None
        self._stopwatch.engine_begins()
        return self.engine.launch([(self._prompts[key].request, count) for key, count in plan.chunks])

    def _computed(self, plan: PrefillPlan, iteration: Iteration) -> None:
        outputs = self.engine.finish(iteration)
        self._stopwatch.engine_ends()
        self.schedule.took(*self._stopwatch.lap())
        self._changes.num_computed += sum(count for _, count in plan.chunks)
        for output in outputs:
            self._take_output(output)
        for key, count in plan.chunks:
            self.schedule.computed(key, count)
            self._after_chunk(self._prompts[key])

    def _take_output(self, output: TokenOutput) -> None:
        prompt = self._prompts[key_of(output.request_id)]
        if prompt.logprobs is not None:
            prompt.logprobs += output.prompt_logprobs or ()
        if isinstance(output.error, BrokenLogits):
            self._prefix_cache.spoilt(prompt.prefix)
        if says_something(output):
            news = news_of(output, prompt.request, prompt.logprobs)
            # Only reported with the very first token: a restarted prompt finds mostly its own KV.
            news.num_reused = 0 if prompt.work.output else prompt.prefix.num_found
            self._changes.news.append(news)

    def _after_chunk(self, prompt: Prompt) -> None:
        request = prompt.request
        self._prefix_cache.computed(request, prompt.prefix)
        if request.status is Status.HELD:
            self._drop(prompt, None)  # The request ended with its first token, or with its embedding
        elif prompt.is_computed:
            self.engine.part(request)
            self._hold(prompt)
            self._save_columns(prompt, self.engine.format.num_columns(request.num_computed))
        else:
            self._changes.progress.append((prompt.key, request.num_computed, prompt.prefix.num_found))
            self._save_columns(prompt, request.num_computed // self.engine.format.block_size)

    def _hold(self, prompt: Prompt) -> None:
        """Lets decode instances pull RT from here."""
        if prompt.work.deadlines.is_rt:
            blocks = blocks_with(self.engine, prompt.request, prompt.request.num_computed)
            if self._hand_over.hold(prompt.key, blocks):
                self._changes.held.append(prompt.key)

    def _let_go(self, key: RequestKey) -> None:
        self._leave_if_done(self._prompts[key])

    # ---- copies -----------------------------------------------------------------------------------------------------

    def _load_cached(self, work: Work) -> None:
        prompt = self._prompts[work.request.key]
        end = self.engine.format.num_columns(work.num_cached)
        self._load(prompt.key, self._pairs(prompt, 0, end), self._loaded, work.deadlines.is_rt)

    def _loaded(self, outcome: Outcome) -> None:
        prompt = self._prompts[outcome.keys[0]]
        if outcome.error is not None:
            self._drop(prompt, Failed(prompt.key, "load", outcome.error))
        elif prompt.is_dropped:
            self._leave_if_done(prompt)
        else:
            self.schedule.loaded(prompt.key)
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
            self._save(prompt.key, pairs, num_empty, self._saved, prompt.work.deadlines.is_rt)

    def _saved(self, outcome: Outcome) -> None:
        prompt = self._prompts[outcome.keys[0]]
        if outcome.error is not None:
            self._drop(prompt, Failed(prompt.key, "save", outcome.error))
        else:
            self._leave_if_done(prompt)

    def _preempt(self, prompt: Prompt) -> None:
        prompt.is_preempted = True
        self.engine.part(prompt.request)
        num_computed = prompt.request.num_computed
        # The pool has what was loaded from it. Its last block may hold more tokens than this instance has been told.
        if num_computed > prompt.work.num_cached:
            self._save_columns(prompt, self.engine.format.num_columns(num_computed))
        self._leave_if_done(prompt)

    def _preempted(self, prompt: Prompt) -> None:
        self.schedule.preempted(prompt.key)
        self.engine.release(prompt.request)
        del self._prompts[prompt.key]
        if prompt.logprobs:
            self._partial_logprobs[prompt.key] = prompt.logprobs
        self._preparation.put_back(prompt.key, prompt.request.matcher)

    def _pairs(self, prompt: Prompt, first: int, end: int) -> Pairs:
        return pairs_of(self.engine, prompt.request, prompt.work.blocks, first, end, prompt.num_passed)

    # ---- what staging asks of the worker ----------------------------------------------------------------------------

    def load(self, key: RequestKey, pairs: Pairs, done: Done, is_urgent: bool) -> None:
        self._load(key, pairs, done, is_urgent)

    def abandon(self, key: RequestKey) -> None:
        self.transfers.abandon(key)

    def staged(self, key: RequestKey) -> None:
        self._changes.staged.append(key)

    def say(self, message: AnyMessage) -> None:
        self._outbox.append(message)

    # ---- a prompt's end ---------------------------------------------------------------------------------------------

    def _drop(self, prompt: Prompt, last_message: Failed | Gone | None) -> None:
        """Stops work on the prompt. It leaves when no copy is running, and its last message is then sent."""
        if not prompt.is_dropped:
            prompt.is_dropped, prompt.last_message = True, last_message
            self.schedule.abort(prompt.key)
            if prompt.request.status is Status.RUNNING:
                self.engine.part(prompt.request)
            self.transfers.abandon(prompt.key)
            self._hand_over.drop(prompt.key)
        elif isinstance(last_message, Gone):
            prompt.last_message = last_message
        self._leave_if_done(prompt)

    def _leave_if_done(self, prompt: Prompt) -> None:
        if self._num_copies[prompt.key]:
            return
        if prompt.is_dropped:
            if prompt.key in self._hand_over:
                return
            self._outbox += [prompt.last_message] if prompt.last_message else []
            self.schedule.saved(prompt.key)
        elif prompt.is_preempted:
            self._preempted(prompt)
            return
        elif not prompt.is_computed:
            return
        elif not prompt.is_saved:
            prompt.is_saved = True
            self._changes.saved.append((prompt.key, prompt.request.num_computed))
            self.schedule.saved(prompt.key)
        if prompt.key not in self._hand_over:
            self._leave(prompt)

    def _leave(self, prompt: Prompt) -> None:
        self.engine.release(prompt.request)
        del self._prompts[prompt.key]

    # ---- reports ----------------------------------------------------------------------------------------------------

    def _take_messages(self, duration_s: float) -> list[AnyMessage]:
        messages: list[AnyMessage] = []
        num_free_blocks, changes = self.schedule.num_free_blocks, self._changes
        changes.num_asked, changes.num_found = self._prefix_cache.take_counts()
        if changes != Changes() or num_free_blocks != self._last_num_free:
            messages.append(
                PrefillReport(
                    news=changes.news,
                    saved=changes.saved,
                    staged=changes.staged,
                    progress=changes.progress,
                    num_free_blocks=num_free_blocks,
                    duration_s=duration_s,
                    moved=list(self._moved.values()),
                    num_computed=changes.num_computed,
                    num_asked=changes.num_asked,
                    num_found=changes.num_found,
                    pace=self.schedule.pace,
                    held=changes.held,
                )
            )
            self._moved = {}
        messages += self._outbox
        self._changes, self._last_num_free, self._outbox = Changes(), num_free_blocks, []
        return messages
