"""Starts prefills: reserves room in the pool, then sends the prompt to an instance."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from alignedserve.protocol.messages import Prefill, Reserved
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.instance_views import ColocatedView, PrefillView
from alignedserve.router.offers import Offers
from alignedserve.router.outbox import Outbox
from alignedserve.router.pool_client import PoolClient
from alignedserve.router.prefill_queue import PrefillQueue
from alignedserve.router.request_state import Phase, RequestState
from alignedserve.router.request_table import RequestTable
from alignedserve.router.requeuer import Requeuer
from alignedserve.router.transitions import PhaseTransitions
from alignedserve.scheduling.island import Island
from alignedserve.scheduling.policies.base import RouterPart
from alignedserve.scheduling.prefix_affinity import num_to_compute
from alignedserve.types import InstanceId

# The most requests that one event starts. The pool's answers are the next events.
MAX_STARTS = 16


@dataclass(eq=False, slots=True)
class PrefillDispatch:
    _cluster: ClusterState
    _requests: RequestTable
    _prefill_queue: PrefillQueue
    _transitions: PhaseTransitions
    _requeuer: Requeuer
    _offers: Offers
    _pool: PoolClient
    _outbox: Outbox
    _policy: RouterPart
    _island: Island

    def start(self) -> None:
        if not (self._prefill_queue and self._cluster.pool and self._cluster.prefills):
            return
        for request in islice(self._policy.start(self._island), MAX_STARTS):
            state = self._requests[request.key]
            if state.is_embedding or (self._cluster.is_colocated and not state.blocks):
                # It reserves room in the pool only when it is evicted. An embedding never needs any.
                self._compute(state)
                continue
            self._transitions.enter(state, Phase.RESERVING)
            self._pool.reserve(state, _num_tokens_to_reserve(state))

    def reserved(self, state: RequestState, reserved: Reserved) -> None:
        if reserved.blocks is None:
            self._refused(state)
            return
        state.blocks = reserved.blocks
        if self._cluster.prefills and not state.is_pooled and self._is_enough(state):
            self._compute(state)
        else:
            self._requeuer.requeue(state)

    def _is_enough(self, state: RequestState) -> bool:
        """Returns whether the reserved room holds all of the request's tokens. It does not if the request was pooled,
        and the pool has dropped its KV meanwhile."""
        pool = self._cluster.pool
        return pool is not None and len(state.blocks) * pool.hello.limits.block_size >= state.num_tokens

    def _refused(self, state: RequestState) -> None:
        """Handles a refused reservation. Real time takes the room that is pinned. So does a request with some KV in the
        pool: otherwise it would wait forever for the other pinned ones."""
        if not ((state.is_rt or state.num_cached) and self._requeuer.unpin_all()):
            self._prefill_queue.refused(state)
        self._requeuer.requeue(state)

    def _compute(self, state: RequestState) -> None:
        """Sends the prompt to the instance that the policy chooses."""
        view, num_known = self._choose(state)
        num_pending = num_to_compute(state.num_missing, num_known)
        if isinstance(view, ColocatedView):
            self._offers.offer(view.instance_id, [state], is_batch=False, batch=0)
        else:
            self._transitions.enter(state, Phase.PREFILLING, view.instance_id)
            self._outbox.send(view.instance_id, Prefill([state.work()]))
        view.pending.put(state.key, num_pending, state.is_rt)

    def _choose(self, state: RequestState) -> tuple[PrefillView | ColocatedView, int]:
        """Returns the instance, and the number of prompt tokens that its prefix cache may hold."""
        views = self._cluster.prefills
        hashes = state.prefix_hashes if views[0].hello.limits.enable_prefix_caching else []

        def num_known(instance_id: InstanceId) -> int:
            view = self._cluster.computing(instance_id)
            # A prompt with KV in the pool loads it from there.
            return (
                view.prompts.prefix_affinity.num_cached_tokens(hashes) if view and not state.num_cached else 0
            )

        chosen = self._policy.place(state, views, lambda view: num_known(view.instance_id), self._island)
        view = next(view for view in views if view is chosen)
        found = view, num_known(view.instance_id)
        view.prompts.prefix_affinity.add(hashes)
        return found


def _num_tokens_to_reserve(state: RequestState) -> int:
    """Returns the number of tokens to reserve room for. A pooled request asks only for the KV that it already has
    there, because the pool can't refuse that. After a refusal it would not be known whether that KV still exists."""
    return state.num_cached if state.is_pooled else state.num_tokens
