"""What instances report after an iteration. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from alignedserve.protocol.messages import (
    WHOLE_ANSWERS,
    DecodeReport,
    FailedPull,
    MakeSpare,
    NewTokens,
    PrefillReport,
)
from alignedserve.router.clock import with_first_token
from alignedserve.router.copies import DirectHandOver, StagedTransfers
from alignedserve.router.leaving import EndedAnswers, Eviction, Recaller, Requeuer
from alignedserve.router.pool_client import PoolClient
from alignedserve.router.requests import Phase, RequestState
from alignedserve.router.state import RouterState
from alignedserve.router.transitions import PhaseTransitions
from alignedserve.router.views import ColocatedView, DecodeView, PrefillView
from alignedserve.types import InstanceId, RequestKey

# ---- tokens ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class OutputProcessor:
    """Appends the tokens that instances report to their requests, and finishes requests with complete answers."""

    _router: RouterState
    _recaller: Recaller
    _ended_answers: EndedAnswers
    _pool: PoolClient

    def process(
        self, sender: InstanceId, all_news: Iterable[NewTokens], ended: Sequence[RequestKey] = ()
    ) -> None:
        """Appends the news. Skips requests that the sender no longer has, because messages cross. `ended`: see
        `DecodeReport`."""
        find, now = self._router.requests.get, self._router.clock.now
        for news in all_news:
            state = find(news.key)
            if news.is_spoilt and state and state.era == self._router.era:
                # All others with KV are of an earlier era from then on, so an iteration begins at most one.
                self._pool.distrust_all()
            if state and state.instance_id == sender and not state.is_finished:
                self._append(sender, state, news, now)
                if news.finish_reason:
                    self._finish(sender, state, news.finish_reason, state.key in ended)

    def _append(self, sender: InstanceId, state: RequestState, news: NewTokens, now: float) -> None:
        output = state.output
        num_before = len(output)
        if news.first != num_before:
            raise RuntimeError(
                f"{sender}: request {news.key} has {num_before} tokens, but {news.first} come before the new ones"
            )
        if not num_before and news.tokens:
            self._router.output.add_progress(state, len(state.request.prompt), news.num_reused, now)
        output += news.tokens
        if not num_before:
            self._note_first_token(state)
        elif num_before == 1 and state.is_rt and not state.deadlines.is_lost(1, now):
            # A lost request has waited for others.
            self._router.cluster.note_second_token(now - state.deadlines.first_due_s)
        self._router.prefill_queue.turns(state.is_rt).serve(state.owner, len(news.tokens))
        if view := self._router.cluster.computing(sender):
            self._note_computed(view, state)
        if news.finish_reason or not num_before:
            self._router.output.add_timeline(state)
        self._router.output.add(state, news, now)
        if news.finish_reason:
            return
        num_output = len(output)
        if state.forecast.length <= num_output:
            state.forecast.advance(num_output, now)
        if state.demanded_output <= num_output:
            self._router.demand.add(state)

    def _note_computed(self, view: PrefillView | ColocatedView, state: RequestState) -> None:
        """Notes that nothing of the prompt is left to compute."""
        if isinstance(view, ColocatedView):
            view.pending.discard(state.key)
        elif state.key in view.pending:
            # A prefill instance has the request until its KV is saved.
            view.pending.put(state.key, 0, state.is_rt, state.owner)

    def _note_first_token(self, state: RequestState) -> None:
        state.deadlines = with_first_token(state.deadlines, self._router.clock.now)
        if (expecting := self._router.cluster.decode(state.expected_at)) and state.key in expecting.coming:
            expecting.coming[state.key] = True

    def _finish(self, sender: InstanceId, state: RequestState, reason: str, is_held: bool) -> None:
        # Only the lengths of complete answers help to predict others of their class.
        if reason in WHOLE_ANSWERS and not state.is_embedding:
            self._router.demand.learn_output_len(state)
        if is_held:
            self._ended_answers.ended(state, sender)
            return
        # A prefill instance may still be saving the request's KV.
        is_forgotten = self._router.cluster.decode(sender) is not None
        self._recaller.finish(state, forgotten_by=sender if is_forgotten else None)


# ---- everything else -------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class InstanceReports:
    """The reports of instances: tokens, prompt progress, and saved, admitted and evicted requests."""

    _router: RouterState
    _transitions: PhaseTransitions
    _requeuer: Requeuer
    _output_processor: OutputProcessor
    _staging: StagedTransfers
    _eviction: Eviction
    _ended_answers: EndedAnswers
    _pool: PoolClient
    _hand_over: DirectHandOver

    def prefill(self, sender: InstanceId, report: PrefillReport) -> None:
        view = self._router.cluster.prefill(sender)
        if view is None:
            raise RuntimeError(
                f"{sender} reports as a prefill instance, but no prefill instance of this name is up"
            )
        self._router.counters.add_report(sender, report)
        view.num_free_blocks, view.pace = report.num_free_blocks, report.pace
        self._output_processor.process(sender, report.news)
        self._hand_over.held(view, report.held)
        for key, num_computed, num_reused in report.progress:
            if state := self._router.requests.find(key, sender, Phase.PREFILLING):
                view.pending.put(key, max(state.num_tokens - num_computed, 0), state.is_rt, state.owner)
                self._router.output.add_progress(state, num_computed, num_reused, self._router.clock.now)
        for key, num_tokens in report.saved:
            if state := self._router.requests.find(key, sender, Phase.PREFILLING):
                state.num_cached = num_tokens
                self._requeuer.requeue(state)
            else:
                self._hand_over.saved(sender, key, num_tokens)
        self._staging.staged(sender, report.staged)

    def decode(self, sender: InstanceId, report: DecodeReport) -> None:
        view = self._router.cluster.decode(sender)
        if view is None:
            raise RuntimeError(
                f"{sender} reports as a decode instance, but no decode instance of this name is up"
            )
        self._router.counters.add_report(sender, report)
        view.report, view.num_free_blocks = report, report.num_free_blocks
        if report.admitted:
            self._admitted(view, report.admitted)
        for pull in report.failed_pulls:
            self._pull_failed(sender, pull)
        self._output_processor.process(sender, report.news, report.ended)
        view.pace = report.pace
        if report.progress and isinstance(view, ColocatedView):
            self._computed(view, report.progress)
        self._eviction.dropped(view, report.dropped)
        self._eviction.wanted(view, report)
        for key, num_tokens in report.evicted:
            self._eviction.evicted(view, key, num_tokens)
            self._ended_answers.saved(view, key, num_tokens)

    def _computed(self, view: ColocatedView, progress: Sequence[tuple[RequestKey, int, int]]) -> None:
        for key, num_computed, num_reused in progress:
            if key in view.pending and (state := self._router.requests.get(key)):
                view.pending.put(key, max(state.num_tokens - num_computed, 0), state.is_rt, state.owner)
                self._router.output.add_progress(state, num_computed, num_reused, self._router.clock.now)

    def _admitted(self, view: DecodeView, keys: Sequence[RequestKey]) -> None:
        """Lets admitted requests run. The pool's copy of their KV is now a spare."""
        instance_id = view.instance_id
        found = [self._router.requests.find(key, instance_id, Phase.OFFERED) for key in keys]
        states = [state for state in found if state]
        if not view.is_batch_begun and any(state.key in view.batch for state in states):
            view.is_batch_begun = True
            self._router.counters.of(instance_id).num_batch_switches += 1
        for state in states:
            if staged := state.staged:
                self._router.link_health.succeeded(staged.at, instance_id, state.key)
                stager = self._router.cluster.prefill(staged.at)
                is_handed_over = bool(stager and state.key in stager.held)
                self._router.counters.of(staged.at).num_handed_over += is_handed_over
            self._transitions.enter(state, Phase.RUNNING, instance_id)
        self._staging.unstage(states)
        if pooled := [state.key for state in states if state.blocks and not state.saving_at]:
            self._pool.send(MakeSpare(pooled))

    def _pull_failed(self, decode: InstanceId, pull: FailedPull) -> None:
        """Counts a failed pull, unless its source is gone or all its requests were recalled: then the link is not to
        blame."""
        found = [self._router.requests.find(key, decode, Phase.OFFERED) for key in pull.keys]
        if any(state and state.staged and state.staged.at == pull.source for state in found):
            self._router.counters.of(decode).num_failed_pulls += 1
            self._router.link_health.failed(decode, pull)
