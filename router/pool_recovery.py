"""Handles the loss of the pool, its return, and KV that it has dropped."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.protocol.messages import Hello, MakeSpare, UsePool
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.counters import Counters
from alignedserve.router.eviction import Eviction
from alignedserve.router.instance_views import Search
from alignedserve.router.orphans import Orphans
from alignedserve.router.outbox import Outbox
from alignedserve.router.pool_client import PoolClient
from alignedserve.router.prefill_queue import PrefillQueue
from alignedserve.router.recaller import Recaller
from alignedserve.router.request_state import Phase, RequestState
from alignedserve.router.request_table import RequestTable
from alignedserve.router.requeuer import Requeuer
from alignedserve.types import RequestKey


@dataclass(eq=False, slots=True)
class PoolRecovery:
    _cluster: ClusterState
    _requests: RequestTable
    _prefill_queue: PrefillQueue
    _requeuer: Requeuer
    _recaller: Recaller
    _eviction: Eviction
    _orphans: Orphans
    _pool: PoolClient
    _outbox: Outbox
    _counters: Counters
    # The shared memory segment of the last pool that connected.
    segment: str = ""

    def closed(self) -> None:
        self._pool.retry_refused()
        for view in self._cluster.all_decodes:
            view.batch_search, view.near_search = Search(), Search()
        for key in list(self._prefill_queue.reserving):
            self._requeuer.requeue(self._requests[key])

    def connected(self, hello: Hello) -> None:
        if hello.segment != self.segment:
            self.segment = hello.segment
            for process in self._cluster.instances:
                self._outbox.send(process.instance_id, UsePool(self.segment))
        stored, span = {each.key: each for each in hello.inventory}, hello.limits.span
        # Requests that ask for room come last: the pool may make room from KV that other requests still need and have
        # not committed again yet.
        for state in sorted(self._requests, key=lambda state: state.phase is Phase.MAKING_ROOM):
            found = stored.pop(state.key, None)
            if found is None:
                state.blocks, state.num_cached = [], 0
            elif found.blocks != state.blocks:
                state.blocks = found.blocks
                state.num_cached = span.num_usable(found.num_tokens, state.num_tokens)
            elif found.num_tokens < state.num_cached:
                # The instance that saved the KV finished while the pool was away. The pool does not keep uncommitted KV
                # as a spare.
                self._pool.commit(state, is_candidate=False)
            self._reconcile(state)
        for orphan in stored.values():
            self._orphans.add(orphan, span)

    def _reconcile(self, state: RequestState) -> None:
        """Continues the request with what the returned pool has of it."""
        match state.phase:
            case _ if state.saving_at and state.blocks and state.phase is not Phase.LEAVING:
                pass  # Its blocks are still being filled, like a prompt's.
            case Phase.QUEUED:
                self._requeuer.requeue(state)
            case Phase.POOLED if state.is_pooled:
                self._pool.commit(state, is_candidate=True)
            case Phase.STAGED | Phase.OFFERED if state.is_pooled:
                self._pool.commit(state, is_candidate=False)
            case Phase.RUNNING if not state.saving_at:
                if state.blocks:
                    self._pool.send(MakeSpare([state.key]))
            case Phase.MAKING_ROOM:
                self._eviction.reserve(state)
            case Phase.PREFILLING | Phase.EVICTING if state.blocks:
                pass
            case Phase.LEAVING:
                pass
            case _:
                # Some of the KV that the request needs is lost.
                self._counters.recoveries["kvpool"] += 1
                self._recaller.recall(state)

    def dropped(self, key: RequestKey) -> None:
        """Handles a request of which the pool no longer has anything."""
        self._orphans.drop(key)
        state = self._requests.get(key)
        if state is None:
            return
        state.num_cached, state.blocks = 0, []
        self._prefill_queue.pinned.pop(key, None)
        if state.phase is Phase.POOLED:
            self._requeuer.requeue(state)
        elif state.phase is Phase.RESERVING:
            self._prefill_queue.reserving.put(key, state.num_missing, state.is_rt)

    def release_expired_orphans(self) -> None:
        expired = self._orphans.take_expired()
        self._pool.release([key for key in expired if self._is_unused(key)])

    def _is_unused(self, key: RequestKey) -> bool:
        """Returns whether the blocks are still unused. The request may have come back, and its reservation may use them
        now."""
        state = self._requests.get(key)
        return state is None or (state.phase is Phase.QUEUED and not state.blocks)
