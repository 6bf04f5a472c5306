"""Direct hand-over: a decode instance pulls real-time KV from the blocks in which the prompt was just computed, while
the prefill instance saves it to the pool.

A request is handed over directly if its prefill instance holds its KV, the policy has a decode instance for it, and the
link between the two works. Its pool blocks stay reserved until the prefill instance has reported success or failure, or
is gone (`RequestState.saving_at`). The request is not evicted before. If the decode instance loses it meanwhile, it
continues from the pool after it is saved (`Recaller`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.protocol.messages import Failed, MakeSpare, Unstage
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.eviction import Eviction
from alignedserve.router.instance_views import PrefillView
from alignedserve.router.link_health import LinkHealth
from alignedserve.router.offers import Offers
from alignedserve.router.outbox import Outbox
from alignedserve.router.pool_client import PoolClient
from alignedserve.router.request_state import Phase, RequestState
from alignedserve.router.request_table import RequestTable
from alignedserve.router.transitions import PhaseTransitions
from alignedserve.scheduling.island import Island
from alignedserve.scheduling.policies.base import RouterPart
from alignedserve.types import InstanceId, RequestKey


@dataclass(eq=False, slots=True)
class HandOver:
    # See RouterConfig.
    _link: str
    _cluster: ClusterState
    _requests: RequestTable
    _transitions: PhaseTransitions
    _outbox: Outbox
    _offers: Offers
    _eviction: Eviction
    _pool: PoolClient
    _link_health: LinkHealth
    _policy: RouterPart
    _island: Island

    def held(self, stager: PrefillView, keys: Sequence[RequestKey]) -> None:
        """Handles prompts that a prefill instance has just computed, and still holds. Each goes to a decode instance at
        once, or the prefill instance is told to release it."""
        unwanted = []
        for key in keys:
            # A request that is not found is finished or was recalled, and the instance was told so.
            if state := self._requests.find(key, stager.instance_id, Phase.PREFILLING):
                if decode := self._choose(stager, state):
                    self._hand_over(stager, decode, state)
                else:
                    unwanted.append(key)
        if unwanted:
            self._outbox.send(stager.instance_id, Unstage(unwanted))

    def _choose(self, stager: PrefillView, state: RequestState) -> InstanceId | None:
        if self._link == "host" or not (state.is_rt and state.output):
            return None
        views = [
            view for view in self._cluster.decodes if self._link_health.may_stage(stager, view.instance_id)
        ]
        chosen = self._policy.hand_over_to(state, views, self._island) if views else None
        return chosen.instance_id if chosen else None

    def _hand_over(self, stager: PrefillView, decode: InstanceId, state: RequestState) -> None:
        self._link_health.staged(stager.instance_id, decode, state.key)
        # A prefill instance frees no blocks of a prompt that it computes.
        span = stager.hello.limits.span
        stager.held[state.key] = span.num_groups * span.num_columns(state.num_tokens - 1)
        self._transitions.hand_over(state, stager.instance_id, decode)
        self._offers.offer(decode, [state], is_batch=False, batch=0, source=stager.instance_id)

    # ---- the copy to the pool ----------------------------------------------------------------------------------------

    def saved(self, stager: InstanceId, key: RequestKey, num_tokens: int) -> None:
        """Notes that the pool has the KV of the request's first `num_tokens` tokens: its prompt."""
        if (state := self._saved_by(stager, key)) is None:
            return
        self._transitions.end_saving(state)
        state.num_cached = num_tokens
        self._pool.commit(state, is_candidate=False)
        if state.phase is Phase.RUNNING:
            self._pool.send(MakeSpare([key]))
        self._may_leave(state)

    def failed(self, sender: InstanceId, failed: Failed) -> bool:
        """Handles a failed copy to the pool, if a decode instance has the request. Its prefill instance has forgotten
        it. Returns False for all other failures."""
        if (state := self._saved_by(sender, failed.key)) is None:
            return False
        if stager := self._cluster.prefill(sender):
            stager.discard(failed.key)
        self._transitions.unstage(state)
        self.not_saved(state)
        return True

    def not_saved(self, state: RequestState) -> None:
        """Notes that the prefill instance no longer saves the request's KV. Its decode instance has the only copy, or
        it is computed again."""
        self._transitions.end_saving(state)
        state.num_cached, state.blocks = 0, []
        self._pool.release([state.key])
        self._may_leave(state)

    def _may_leave(self, state: RequestState) -> None:
        """Evicts the request if its decode instance has named it as a victim meanwhile: the instance does so only
        once."""
        view = self._cluster.decode(state.instance_id)
        if state.phase is Phase.RUNNING and view and view.report and state.key in view.report.wants_evicted:
            self._eviction.wanted(view, view.report)

    def _saved_by(self, stager: InstanceId, key: RequestKey) -> RequestState | None:
        state = self._requests.get(key)
        is_other = state is None or state.saving_at != stager or state.phase is Phase.LEAVING
        return None if is_other else state
