"""Puts requests that no instance has back into a queue: for decode if the pool has all of their KV, otherwise for
prefill."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.protocol.messages import MakeSpare
from alignedserve.router.pool_client import PoolClient
from alignedserve.router.pool_demand import PoolDemand
from alignedserve.router.prefill_queue import PrefillQueue
from alignedserve.router.request_state import Phase, RequestState
from alignedserve.router.transitions import PhaseTransitions
from alignedserve.scheduling.island import Island
from alignedserve.scheduling.policies.base import RouterPart


@dataclass(eq=False, slots=True)
class Requeuer:
    _transitions: PhaseTransitions
    _prefill_queue: PrefillQueue
    _demand: PoolDemand
    _pool: PoolClient
    _policy: RouterPart
    _island: Island

    def requeue(self, state: RequestState) -> None:
        """Continues the request with what the pool has of it."""
        if state.is_pooled:
            self._transitions.enter(state, Phase.POOLED)
            self._pool.commit(state, is_candidate=True)
            self._forget_copies(state)
        else:
            self.queue_prefill(state)

    def queue_prefill(self, state: RequestState) -> None:
        """Queues the request for prefill, where it waits for room in the pool. By the time that is granted, the pool
        may have dropped the request's current KV."""
        state.num_cached = state.num_reusable
        self._transitions.enter(state, Phase.QUEUED)
        self._prefill_queue.push(state, self._policy.urgency(state, self._island))
        self._pin_or_free(state)
        self._forget_copies(state)

    def _forget_copies(self, state: RequestState) -> None:
        self._transitions.unstage(state)
        self._transitions.end_saving(state)

    def _pin_or_free(self, state: RequestState) -> None:
        """Makes a queued request's KV in the pool a spare, because requests before it might otherwise wait forever for
        that room. The exception is KV that the policy pins. Even that can be taken by real time and by victims
        (`unpin_all`)."""
        if state.num_cached:
            # Only committed KV can be a spare, and a request that was evicted halfway has committed nothing yet.
            self._pool.commit(state, is_candidate=False)
            if self._policy.pins(state):
                self._prefill_queue.pinned[state.key] = state
                self._demand.add(state)
            else:
                self._pool.send(MakeSpare([state.key]))
        elif state.blocks:
            state.blocks = []
            self._pool.release([state.key])

    def unpin_all(self) -> bool:
        """Makes all pinned KV in the pool spare. Returns whether there was any."""
        pinned = self._prefill_queue.take_pinned()
        if pinned:
            self._pool.send(MakeSpare([state.key for state in pinned]))
            self._prefill_queue.clear_refusals()
        for state in pinned:
            self._demand.discard(state)
        return bool(pinned)
