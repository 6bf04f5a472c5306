"""A decode instance: carries out its schedule's plans on the engine, and reports.

An iteration has everything it needs when it starts. It does not wait for the router, and copies run beside computation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor as Threads
from dataclasses import replace
from functools import partial
from itertools import zip_longest

from alignedserve.decode_worker.plan import DecodePlan
from alignedserve.decode_worker.schedule import DecodeSchedule
from alignedserve.engine.outputs import TokenOutput
from alignedserve.engine.request import Request
from alignedserve.instance.copies import blocks_with, pairs_of
from alignedserve.instance.executor import Executor, Transfers
from alignedserve.instance.memory import BlockManager
from alignedserve.instance.requests import adopt, complete, key_of, limits_of
from alignedserve.instance.worker import Step, Worker
from alignedserve.kv.end_copies import Cut, EndCopy, num_parts
from alignedserve.protocol.messages import (
    WHOLE_ANSWERS,
    Abort,
    AnnounceRt,
    AnyMessage,
    DecodeReport,
    Evict,
    Failed,
    FailedPull,
    ForgetAll,
    Gone,
    NewTokens,
    Offer,
    Work,
)
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import Policy, make_policy
from alignedserve.timing.estimate import Estimate
from alignedserve.transport.completions import Outcome
from alignedserve.transport.runs import HAS_BLOCK, TransferSpec
from alignedserve.types import BlockId, InstanceId, RequestKey

# Seconds after which a complete answer that is not being saved leaves its blocks to requests that need them. The router
# answers within milliseconds, unless it or the pool stands still.
HOLD_S = 0.5


class DecodeWorker(Worker):
    computes_prompts = False
    schedule: DecodeSchedule
    _requests: dict[RequestKey, Request]
    _report: DecodeReport

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
        policy = policy or make_policy(SchedulingConfig())
        shares_blocks = self.computes_prompts and policy.config.share_blocks
        keeps_all = shares_blocks or engine.limits.max_restored_blocks or not engine.span.window
        max_step = engine.limits.max_num_batched_tokens
        span = replace(engine.span, window=0) if keeps_all else replace(engine.span, max_step=max_step)
        memory = memory or BlockManager(engine.limits.num_blocks, span)
        memory.count_as(span, counts_once=True)
        super().__init__(engine, transfers, memory, clock, threads, enable_prefix_caching, shares_blocks)
        limits = limits_of(engine, span)
        part = (policy.colocated if self.computes_prompts else policy.decode)(limits, estimate)
        max_parts = num_parts(engine.limits.num_blocks) if shares_blocks else 0
        self.schedule = DecodeSchedule(limits, part, estimate, memory, self.prompts.prefix_cache, max_parts)
        # Addresses of the prefill instances that stage KV for this one.
        self._addresses: dict[InstanceId, str] = {}
        # Requests that were aborted under a copy, with the message to send when it has ended.
        self._last_messages: dict[RequestKey, Gone | None] = {}
        # Requests with a complete answer that wait for Evict or Abort, with the time of their end.
        self._ended: dict[RequestKey, float] = {}
        # These are sent before the next report, which may name the same requests for eviction again.
        self._failed_evictions: list[AnyMessage] = []
        self._report = DecodeReport.empty()

    # ---- orders -----------------------------------------------------------------------------------------------------

    def on(self, order: AnyMessage) -> None:
        match order:
            case Offer():
                self._offered(order)
            case AnnounceRt():
                self.schedule.policy.expect(order.num_prefilling, order.num_ready, self._clock())
            case Evict():
                self._evict(order)
            case Abort():
                for key in order.keys:
                    self._abort(key, Gone([key]))
            case ForgetAll():
                self.prompts.distrust_all(order.era)
            case _:
                raise RuntimeError(f"{type(order).__name__}: no order for a decode instance")

    def _offered(self, order: Offer) -> None:
        begun = [work for work in order.works if work.num_cached and work.output]
        self.schedule.offer(begun, order.is_batch, order.source, order.batch, order.replaces)
        if order.source is not None:
            self._addresses[order.source] = order.address
        for work in order.works:
            if not (work.num_cached and work.output):
                then = partial(self.schedule.offer, [work], order.is_batch, None, order.batch)
                self._prepare(work, then)

    def _evict(self, order: Evict) -> None:
        request = self._requests.get(order.key)
        if request is None:
            return  # The request ended before the order arrived
        if order.key in self._ended:
            if self._has_gap(request, order.num_saved):
                self._let_go(order.key, Gone([order.key]))
                return
            num_tokens = min(request.num_computed, len(order.blocks) * self.engine.format.block_size)
            self._save_changed(order, request, num_tokens)
            return
        scheduled = self.schedule.blocks.running.get(order.key)
        if scheduled and not scheduled.layout.holds_kv:
            # Its blocks can't go to the pool, so the request is computed again.
            self.schedule.blocks.ended(order.key)
            self._leave(order.key)
            self._report.dropped.append(order.key)
            return
        needed = self.memory.span.num_columns(request.num_computed)
        if needed > len(order.blocks):
            reason = f"{needed} blocks hold its KV by now, and {len(order.blocks)} are reserved"
            self._failed_evictions.append(Failed(order.key, "evict", reason))
        elif self.schedule.blocks.evict(order.key):
            self.engine.part(request)
            if (num_left := self.schedule.blocks.leaving[order.key].num_cached) < request.num_computed:
                self.engine.copy_ends([(request, Cut(order.key, num_left))])
            self._save_changed(order, request, request.num_computed)

    def _has_gap(self, request: Request, num_saved: int) -> bool:
        """Returns whether the request has passed columns behind those of its first `num_saved` tokens."""
        return self.memory.span.num_passed(request.num_computed) > num_saved // self.engine.format.block_size

    def _save_changed(self, order: Evict, request: Request, num_tokens: int) -> None:
        """Saves the columns with KV of the first `num_tokens` tokens that the pool lacks, as whole columns, including
        one that it has in part."""
        form, span = self.engine.format, self.memory.span
        first, end = order.num_saved // form.block_size, span.num_columns(num_tokens)
        if num_tokens <= order.num_saved:
            # The pool has all of it, and more if some KV made way for RT.
            first, num_tokens = end, order.num_saved
        held = self.schedule.blocks[order.key]
        pairs = pairs_of(self.memory, held, order.blocks, first, end, span.num_passed(num_tokens))
        num_empty = end * form.block_size - num_tokens if pairs else 0
        self.copies.save(order.key, pairs, num_empty, partial(self._evicted, num_tokens))

    def _abort(self, key: RequestKey, last_message: Gone | None) -> None:
        if key not in self._requests:
            self.prompts.forget(key)
        if key in self._ended and key not in self.copies:
            self._let_go(key, last_message)
        elif self.schedule.abort(key):
            self._last_messages[key] = last_message
            self.transfers.abandon(key)
            if self._compiling.drop(key):
                self._arrived(key)
        elif key in self._requests:
            self._leave(key, last_message)
        elif last_message:
            self._outbox.append(last_message)

    def drop_orders(self) -> None:
        self.schedule.policy.expect(0, 0, self._clock())
        self.prompts.forget_waiting()
        self._let_all_go(math.inf)
        for key in self.schedule.drop_candidates():
            self._abort(key, None)
        self.copies.stop()

    def _drop_rest(self) -> None:
        for key in list(self._requests):
            self._abort(key, None)
        self._failed_evictions.clear()
        self._report, self._last_levels = DecodeReport.empty(), ()

    # ---- copies -----------------------------------------------------------------------------------------------------

    def _pull(self, plan: DecodePlan) -> None:
        """Pulls requests from the pool one by one. Those that a prefill instance has staged are pulled in one
        transfer."""
        staged: dict[InstanceId, list[tuple[RequestKey, list[BlockId]]]] = {}
        for work in plan.pulls:
            key = work.request.key
            scheduled = self.schedule.blocks.pulling[key]
            num_here, matcher = self.prompts.arriving(work, scheduled)
            self._report.num_arriving += work.num_cached
            self._report.num_not_copied += num_here
            request = self._requests[key] = adopt(self.engine, work, scheduled, matcher)
            self._compiling.begin(key, request.matcher)
            span, source = self.memory.span, scheduled.source
            first, num_passed = num_here // span.block_size, span.num_passed(work.num_cached)
            if source is None:
                end = self.memory.span.num_columns(work.num_cached)
                pairs = pairs_of(self.memory, scheduled, work.blocks, first, end, num_passed)
                self.copies.load(key, pairs, self._pulled, work.deadlines.is_rt)
            else:
                blocks = blocks_with(self.memory, scheduled, work.num_cached)
                num_skipped = sum(span.are_held(0, first, num_passed))
                blocks[:num_skipped] = [HAS_BLOCK] * num_skipped
                staged.setdefault(source, []).append((key, blocks))
        for source, specs in staged.items():
            self._pull_from(source, specs)

    def _pull_from(self, source: InstanceId, specs: Sequence[TransferSpec]) -> None:
        done = self.copies.counted([key for key, _ in specs], partial(self._pulled_from, source, specs))
        self.transfers.pull(source, self._addresses[source], specs, done)

    def _pulled_from(self, source: InstanceId, specs: Sequence[TransferSpec], outcome: Outcome) -> None:
        if outcome.is_denied and len(specs) > 1:
            self._pull_each(source, specs, outcome)
            return
        wanted = [key for key in outcome.keys if key not in self._last_messages]
        if outcome.error is not None and not outcome.is_denied and wanted:
            self._report.failed_pulls.append(FailedPull(source, wanted, outcome.error))
        self._pulled(outcome)

    def _pull_each(self, source: InstanceId, specs: Sequence[TransferSpec], outcome: Outcome) -> None:
        """Pulls each request separately, because one is no longer staged."""
        for key, blocks in specs:
            if key in self._last_messages:
                self._pulled(replace(outcome, keys=(key,)))
            else:
                self._pull_from(source, [(key, blocks)])

    def _pulled(self, outcome: Outcome) -> None:
        if outcome.what == "load" and outcome.error is None and outcome.num_bytes:
            self.schedule.forecast.fetched(outcome.num_bytes, outcome.seconds)
        for key in outcome.keys:
            if outcome.error is not None:
                self._compiling.drop(key)
                self.schedule.blocks.pull_failed(key)
                self._leave(key, Failed(key, "pull", outcome.error, outcome.wrong_block))
            else:
                if key in self.schedule.blocks.pulling:
                    # Others need not wait for its grammar.
                    self.prompts.computed([self._requests[key]])
                self._compiling.when_ready(key, partial(self._arrived, key))

    def _start(self, work: Work) -> None:
        key = work.request.key
        request = self._requests[key] = self.prompts.start(work, self.schedule.blocks.running[key])
        self.engine.join(request)
        self._report.admitted.append(key)
        if request.num_computed:
            self._progressed(request)

    def _arrived(self, key: RequestKey) -> None:
        """Handles a request with KV and grammar ready, or an aborted one."""
        if self.schedule.blocks.pulled(key):
            self.engine.join(self._requests[key])
            self._report.admitted.append(key)
        else:
            self._leave(key)

    def _evicted(self, num_tokens: int, outcome: Outcome) -> None:
        """Handles the end of a save. Without an error, the pool has the KV of the request's first `num_tokens`
        tokens."""
        (key,) = outcome.keys
        if key in self._ended:
            is_saved = outcome.error is None and key not in self._last_messages
            if is_saved:
                self._report.evicted.append((key, num_tokens))
            self._let_go(key, None if is_saved else Gone([key]))
        elif outcome.error is None:
            self.prompts.ended(self._requests[key])
            if self.schedule.blocks.evicted(key):
                self._report.evicted.append((key, num_tokens))
            self._leave(key)
        elif self.schedule.blocks.evict_failed(key):
            self.engine.join(self._requests[key])
            self._failed_evictions.append(Failed(key, "evict", outcome.error))
        else:
            self._leave(key)

    def _let_all_go(self, before_s: float) -> None:
        """Releases requests that ended before this time and are not being saved."""
        for key in [key for key, ended_s in self._ended.items() if ended_s < before_s]:
            if key not in self.copies:
                self._let_go(key, Gone([key]))

    def _let_go(self, key: RequestKey, message: Gone | None) -> None:
        """Releases a request with a complete answer. It has no copy in progress."""
        self.schedule.blocks.let_go(key)
        self._leave(key, message)

    def _leave(self, key: RequestKey, message: Failed | Gone | None = None) -> None:
        """Releases a request that does not run and has no copy in progress."""
        self._ended.pop(key, None)
        self.engine.release(self._requests.pop(key))
        self.prompts.left(key)
        last_message = self._last_messages.pop(key) if key in self._last_messages else message
        if last_message:
            self._outbox.append(last_message)

    # ---- iterations -------------------------------------------------------------------------------------------------

    def begin(self) -> Step:
        if self._ended and self._lacks_blocks():
            self._let_all_go(self._clock() - HOLD_S)
        return super().begin()

    def _lacks_blocks(self) -> bool:
        """Returns whether a request that runs, or one that could be admitted, may lack blocks in this iteration."""
        blocks, candidates, num_free = self.schedule.blocks, self.schedule.candidates, self.memory.num_free
        if num_free < len(blocks.running):
            return True
        return any(blocks.needed(each) > num_free for each in (*candidates.requests, *candidates.batch))

    def _carry_out(self, plan: DecodePlan) -> Sequence[tuple[Request, int]]:
        self.patience_s = plan.hold_s or None
        for key in plan.drops:
            self._leave(key)
        if plan.drops:
            self._report.dropped += plan.drops
        for work in plan.new_prompts:
            self._start(work)
        if plan.ends:
            self._carry_out_ends(plan.ends)
        if plan.pulls:
            self._pull(plan)
        requests = map(self._requests.__getitem__, plan.run)
        computing = [(each, each.num_prompt + len(each.output) - each.num_computed) for each in requests]
        if plan.chunks:
            computing += [(self._requests[key], count) for key, count in plan.chunks]
        return computing

    def _carry_out_ends(self, ops: Sequence[EndCopy]) -> None:
        begun_s = self._clock()
        copied = self.engine.copy_ends([(self._requests[op.key], op) for op in ops])
        seconds = self._clock() - begun_s
        for what, num_bytes in (+copied).items():
            self.copies.moved(what, num_bytes, seconds * num_bytes / copied.total())

    def _launch(self, step: Step, work: Sequence[tuple[Request, int]]) -> None:
        if self.prompts.are_computed:
            step.prompts = [
                key_of(request.request_id) for request, count in work if count > 1 or not request.output
            ]
        super()._launch(step, work)
        # With a GPU this runs beside the iteration, since it does not need the tokens.
        plan = step.plan
        step.is_mixed = self.schedule.is_mixed(plan)
        self.schedule.sampled(plan.run)
        for key, count in plan.chunks:
            self.schedule.computed(key, count)

    def _take_outputs(self, step: Step, outputs: Sequence[TokenOutput]) -> None:
        if step.prompts:
            self.prompts.computed(map(self._requests.__getitem__, step.prompts))
        for key, _ in step.plan.chunks:
            self._progressed(self._requests[key])
        if not step.prompts:
            for one, output in zip(step.news, outputs, strict=False):
                complete(one, output)
                if output.finish_reason:
                    self.prompts.failed(output)
                    self._end(one)
            return
        for news, output in zip_longest(step.news, outputs):
            self.prompts.take_output(output, news)
            if news is not None and output.finish_reason:
                self._end(news)

    def _end(self, last: NewTokens) -> None:
        """Ends a request, or holds its KV until the pool has it."""
        key = last.key
        request = self._requests[key]
        self.prompts.ended(request)
        if last.finish_reason in WHOLE_ANSWERS and self._may_go_on(key, request):
            self.schedule.blocks.hold(key)
            self._ended[key] = self._clock()
            self._report.ended.append(key)
        else:
            self.schedule.blocks.ended(key)
            self._leave(key)

    def _may_go_on(self, key: RequestKey, request: Request) -> bool:
        """Returns whether later prompts may begin with this one, and with full blocks that the pool may lack: those of
        its answer, and those of its prompt if it was computed here."""
        work, size = self.schedule.blocks.running[key].work, self.engine.format.block_size
        wanted = work.request
        # The pool knows no blocks shared from both ends, or with inputs, or of a colocated instance with a window.
        limits, is_on = self.schedule.limits, self.schedule.blocks.ends.is_on
        may_be_known = not ((limits.window and self.computes_prompts) or is_on or limits.can_keep_inputs)
        shares = wanted.has_next_turn and not wanted.is_embedding and self.prompts.prefix_cache.is_enabled
        num_there = work.num_found if self.computes_prompts else len(wanted.prompt)
        is_long_enough = request.num_computed // size > num_there // size
        return shares and may_be_known and is_long_enough and not self._has_gap(request, num_there)

    def _finished(self, step: Step) -> list[AnyMessage]:
        if step.plan.goes_on:
            self.schedule.took(*self._stopwatch.lap())
        else:
            self._stopwatch.stop()
        if not (len(self.schedule.blocks) or len(self.schedule.candidates)):
            self._stopwatch.idle()
        return self._take_messages(step, self._clock() - step.begun_s)

    # ---- reports ----------------------------------------------------------------------------------------------------

    def _take_messages(self, step: Step, duration_s: float) -> list[AnyMessage]:
        blocks, messages, self._failed_evictions = self.schedule.blocks, self._failed_evictions, []
        self._report.news = step.news + self._report.news if self._report.news else step.news
        # These counts justify a report when they change, even if nothing was computed.
        levels = self.memory.num_free, len(blocks.running), tuple(step.plan.wants_evicted)
        # When an eviction fails, the router forgets the request for it, so it is sent again.
        if self._has_news(levels) or messages:
            self._describe(step)
            messages.append(self._take_report(duration_s))
        return messages + self._take_outbox()

    def _describe(self, step: Step) -> None:
        """Adds to the report what is not a change."""
        report, forecast, batch = self._report, self.schedule.forecast, self.schedule.candidates.running_batch
        running = self.schedule.blocks.running.values()
        lengths = [request.num_tokens for request in running]
        of_be = [request for request in running if not request.is_rt]
        of_batch = [request.num_tokens for request in running if request.batch == batch] if batch else []
        report.wants_evicted = step.plan.wants_evicted
        report.num_running, report.sum_lengths = len(lengths), sum(lengths)
        report.min_length, report.max_length = min(lengths, default=0), max(lengths, default=0)
        report.num_be_running, report.num_be_blocks = (
            len(of_be),
            self.schedule.blocks.num_freed_together(of_be),
        )
        report.batch = batch
        report.batch_min_length, report.batch_max_length = min(of_batch, default=0), max(of_batch, default=0)
        report.is_mixed, report.scheduling_s = step.is_mixed, step.scheduling_s
        report.outside_s, report.overrun = forecast.outside_s, forecast.last_overrun


class ColocatedWorker(DecodeWorker):
    """Also computes prompts: offered requests need no KV yet. Only here do requests share blocks from both ends, if the
    policy's `share_blocks` is set."""

    computes_prompts = True
