"""Takes requests back from the instances that have them.

A request's pool blocks are released or reused only when no instance can touch them any more. An instance that was told
to forget the request confirms that (`Gone`), or dies. Until then the request is LEAVING.
"""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.protocol.messages import Abort, Release, Unstage
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.counters import Counters
from alignedserve.router.outbox import Outbox
from alignedserve.router.output_coalescing import OutputCoalescing
from alignedserve.router.pool_client import PoolClient
from alignedserve.router.pool_demand import PoolDemand
from alignedserve.router.request_state import Phase, RequestState
from alignedserve.router.request_table import RequestTable
from alignedserve.router.requeuer import Requeuer
from alignedserve.router.transitions import PhaseTransitions
from alignedserve.types import InstanceId


@dataclass(eq=False, slots=True)
class Recaller:
    _cluster: ClusterState
    _requests: RequestTable
    _transitions: PhaseTransitions
    _requeuer: Requeuer
    _demand: PoolDemand
    _pool: PoolClient
    _outbox: Outbox
    _output: OutputCoalescing
    _counters: Counters

    def recall(self, state: RequestState, forgotten_by: InstanceId | None = None) -> None:
        """Takes the request back from wherever it is. It continues from the pool. `forgotten_by`: an instance that has
        already forgotten it."""
        if state.saving_at and forgotten_by == state.instance_id and not state.is_finished:
            self._await_saved(state, state.saving_at)
            return
        if state.phase is Phase.MAKING_ROOM and not (state.blocks or state.is_finished):
            # The pool may still answer with reserved blocks, which nothing else would release.
            self._pool.send(Release([state.key]))
        having = dict.fromkeys(each for each in (state.instance_id, state.staged_at, state.saving_at) if each)
        state.pending_aborts = [each for each in having if each != forgotten_by and each in self._cluster]
        stager = self._cluster.prefill(state.staged_at)
        if stager and stager.discard(state.key):
            self._counters.of(stager.instance_id).num_spills += not state.is_finished
        if not state.pending_aborts:
            self._has_left(state)
            return
        self._transitions.enter(state, Phase.LEAVING)
        for instance_id in state.pending_aborts:
            self._outbox.send(instance_id, Abort(state.key))

    def _await_saved(self, state: RequestState, saver: InstanceId) -> None:
        """Waits for the prefill instance to save the KV of a request that its decode instance has lost. The request
        continues from the pool after that."""
        if state.staged_at and (stager := self._cluster.prefill(state.staged_at)):
            stager.discard(state.key)
            self._outbox.send(stager.instance_id, Unstage([state.key]))
        self._transitions.enter(state, Phase.PREFILLING, saver)
        if view := self._cluster.prefill(saver):
            view.pending.put(state.key, 0, state.is_rt)  # Nothing of it is left to compute there.
        self._transitions.unstage(state)
        self._transitions.end_saving(state)

    def finish(self, state: RequestState, forgotten_by: InstanceId | None = None) -> None:
        """Ends the request everywhere, because its client has its answer, or is gone."""
        self._transitions.finish(state)
        self._output.discard(state.key)
        if state.phase is not Phase.LEAVING:
            self.recall(state, forgotten_by)

    def confirm(self, state: RequestState, instance_id: InstanceId) -> None:
        """Handles the confirmation that an instance has forgotten the request, or the death of that instance."""
        if state.phase is Phase.LEAVING and instance_id in state.pending_aborts:
            state.pending_aborts.remove(instance_id)
            if not state.pending_aborts:
                self._has_left(state)

    def _has_left(self, state: RequestState) -> None:
        if not state.is_finished:
            self._requeuer.requeue(state)
            return
        self._transitions.enter(state, Phase.LEAVING)
        self._demand.discard(state)
        self._requests.remove(state)
        self._pool.release([state.key])
