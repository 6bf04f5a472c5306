"""Appends the tokens that instances report to their requests, and finishes requests with complete answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.protocol.messages import NewTokens
from alignedserve.router.clock import Clock, with_first_token
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.instance_views import ColocatedView, PrefillView
from alignedserve.router.output_coalescing import OutputCoalescing
from alignedserve.router.pool_demand import PoolDemand
from alignedserve.router.recaller import Recaller
from alignedserve.router.request_state import RequestState
from alignedserve.router.request_table import RequestTable
from alignedserve.types import InstanceId

# Finish reasons of complete answers. Only their lengths help to predict others of their class.
WHOLE_ANSWERS = ("stop", "length")


@dataclass(eq=False, slots=True)
class OutputProcessor:
    _clock: Clock
    _cluster: ClusterState
    _requests: RequestTable
    _demand: PoolDemand
    _output: OutputCoalescing
    _recaller: Recaller

    def process(self, sender: InstanceId, all_news: Iterable[NewTokens]) -> None:
        """Appends the news. Skips requests that the sender no longer has, because messages cross."""
        find, now = self._requests.get, self._clock.now
        for news in all_news:
            state = find(news.key)
            if state and state.instance_id == sender and not state.is_finished:
                self._append(sender, state, news, now)

    def _append(self, sender: InstanceId, state: RequestState, news: NewTokens, now: float) -> None:
        output = state.output
        num_before = len(output)
        if news.first != num_before:
            raise RuntimeError(
                f"{sender}: request {news.key} has {num_before} tokens, but {news.first} come before the new ones"
            )
        if not num_before and news.tokens:
            self._output.add_progress(state, len(state.request.prompt), news.num_reused, now)
        output += news.tokens
        if not num_before:
            self._note_first_token(state)
        if view := self._cluster.computing(sender):
            self._note_computed(view, state)
        if news.finish_reason or not num_before:
            self._output.add_timeline(state)
        self._output.add(state, news, now)
        if news.finish_reason:
            self._finish(sender, state, news.finish_reason)
            return
        num_output = len(output)
        if state.forecast.length <= num_output:
            state.forecast.advance(num_output, now)
        if state.demanded_output <= num_output:
            self._demand.add(state)

    def _note_computed(self, view: PrefillView | ColocatedView, state: RequestState) -> None:
        """Notes that nothing of the prompt is left to compute."""
        if isinstance(view, ColocatedView):
            view.pending.discard(state.key)
        elif state.key in view.pending:
            # A prefill instance has the request until its KV is saved.
            view.pending.put(state.key, 0, state.is_rt)

    def _note_first_token(self, state: RequestState) -> None:
        state.deadlines = with_first_token(state.deadlines, self._clock.now)
        if (expecting := self._cluster.decode(state.expected_at)) and state.key in expecting.coming:
            expecting.coming[state.key] = True

    def _finish(self, sender: InstanceId, state: RequestState, reason: str) -> None:
        if reason in WHOLE_ANSWERS and not state.is_embedding:
            self._demand.learn_output_len(state)
        # A prefill instance may still be saving the request's KV.
        is_forgotten = self._cluster.decode(sender) is not None
        self._recaller.finish(state, forgotten_by=sender if is_forgotten else None)
