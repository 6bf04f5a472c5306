"""The reports of instances after an iteration: tokens, prompt progress, and saved, admitted and evicted requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.protocol.messages import DecodeReport, FailedPull, MakeSpare, PrefillReport
from alignedserve.router.clock import Clock
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.counters import Counters
from alignedserve.router.eviction import Eviction
from alignedserve.router.hand_over import HandOver
from alignedserve.router.instance_views import ColocatedView, DecodeView
from alignedserve.router.link_health import LinkHealth
from alignedserve.router.output_coalescing import OutputCoalescing
from alignedserve.router.output_processor import OutputProcessor
from alignedserve.router.pool_client import PoolClient
from alignedserve.router.request_state import Phase
from alignedserve.router.request_table import RequestTable
from alignedserve.router.requeuer import Requeuer
from alignedserve.router.staging import Staging
from alignedserve.router.transitions import PhaseTransitions
from alignedserve.types import InstanceId, RequestKey


@dataclass(eq=False, slots=True)
class InstanceReports:
    _clock: Clock
    _cluster: ClusterState
    _requests: RequestTable
    _transitions: PhaseTransitions
    _requeuer: Requeuer
    _output_processor: OutputProcessor
    _output: OutputCoalescing
    _staging: Staging
    _eviction: Eviction
    _pool: PoolClient
    _counters: Counters
    _link_health: LinkHealth
    _hand_over: HandOver

    def prefill(self, sender: InstanceId, report: PrefillReport) -> None:
        view = self._cluster.prefill(sender)
        if view is None:
            raise RuntimeError(
                f"{sender} reports as a prefill instance, but no prefill instance of this name is up"
            )
        self._counters.of(sender).add_report(report)
        view.num_free_blocks, view.pace = report.num_free_blocks, report.pace
        self._output_processor.process(sender, report.news)
        self._hand_over.held(view, report.held)
        for key, num_computed, num_reused in report.progress:
            if state := self._requests.find(key, sender, Phase.PREFILLING):
                view.pending.put(key, max(state.num_tokens - num_computed, 0), state.is_rt)
                self._output.add_progress(state, num_computed, num_reused, self._clock.now)
        for key, num_tokens in report.saved:
            if state := self._requests.find(key, sender, Phase.PREFILLING):
                state.num_cached = num_tokens
                self._requeuer.requeue(state)
            else:
                self._hand_over.saved(sender, key, num_tokens)
        self._staging.staged(sender, report.staged)

    def decode(self, sender: InstanceId, report: DecodeReport) -> None:
        view = self._cluster.decode(sender)
        if view is None:
            raise RuntimeError(
                f"{sender} reports as a decode instance, but no decode instance of this name is up"
            )
        self._counters.of(sender).add_report(report)
        view.report, view.num_free_blocks = report, report.num_free_blocks
        if report.admitted:
            self._admitted(view, report.admitted)
        for pull in report.failed_pulls:
            self._pull_failed(sender, pull)
        self._output_processor.process(sender, report.news)
        view.pace = report.pace
        if report.progress and isinstance(view, ColocatedView):
            self._computed(view, report.progress)
        self._eviction.dropped(view, report.dropped)
        self._eviction.wanted(view, report)
        for key, num_tokens in report.evicted:
            self._eviction.evicted(view, key, num_tokens)

    def _computed(self, view: ColocatedView, progress: Sequence[tuple[RequestKey, int, int]]) -> None:
        for key, num_computed, num_reused in progress:
            if key in view.pending and (state := self._requests.get(key)):
                view.pending.put(key, max(state.num_tokens - num_computed, 0), state.is_rt)
                self._output.add_progress(state, num_computed, num_reused, self._clock.now)

    def _admitted(self, view: DecodeView, keys: Sequence[RequestKey]) -> None:
        """Lets admitted requests run. The pool's copy of their KV is now a spare."""
        instance_id = view.instance_id
        found = [self._requests.find(key, instance_id, Phase.OFFERED) for key in keys]
        states = [state for state in found if state]
        if not view.is_batch_begun and any(state.key in view.batch for state in states):
            view.is_batch_begun = True
            self._counters.of(instance_id).num_batch_switches += 1
        for state in states:
            if state.staged_at:
                self._link_health.succeeded(state.staged_at, instance_id, state.key)
                stager = self._cluster.prefill(state.staged_at)
                self._counters.of(state.staged_at).num_handed_over += bool(
                    stager and state.key in stager.held
                )
            self._transitions.enter(state, Phase.RUNNING, instance_id)
        self._staging.unstage(states)
        if pooled := [state.key for state in states if state.blocks and not state.saving_at]:
            self._pool.send(MakeSpare(pooled))

    def _pull_failed(self, decode: InstanceId, pull: FailedPull) -> None:
        """Counts a failed pull, unless its source is gone or all its requests were recalled: then the link is not to
        blame."""
        found = [self._requests.find(key, decode, Phase.OFFERED) for key in pull.keys]
        if any(state and state.staged_at == pull.source for state in found):
            self._counters.of(decode).num_failed_pulls += 1
            self._link_health.failed(decode, pull)
