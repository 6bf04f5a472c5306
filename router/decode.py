"""Assigns requests that wait in the pool to decode instances, as the policy decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.protocol.messages import Candidates
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.counters import Counters
from alignedserve.router.decode_queue import DecodeQueue
from alignedserve.router.offers import Offers
from alignedserve.router.pool_client import PoolClient
from alignedserve.router.request_state import RequestState
from alignedserve.router.staging import Staging
from alignedserve.scheduling.island import Assign, Island
from alignedserve.scheduling.policies.base import RouterPart
from alignedserve.types import InstanceId


@dataclass(eq=False, slots=True)
class DecodeDispatch:
    _cluster: ClusterState
    _decode_queue: DecodeQueue
    _staging: Staging
    _offers: Offers
    _pool: PoolClient
    _counters: Counters
    _policy: RouterPart
    _island: Island

    def assign(self) -> None:
        if not self._cluster.pool:
            return
        for order in self._policy.decide(self._island):
            if isinstance(order, Assign):
                self._take(order)
            else:
                self._pool.send(order)

    def _take(self, order: Assign) -> None:
        states = [state for request in order.requests if (state := self._decode_queue.get(request.key))]
        if len(states) < len(order.requests):
            raise RuntimeError(
                f"{order.decode}: offered requests are not in the pool, or one is offered twice"
            )
        for state in states:
            self._pool.commit(state, is_candidate=False)
        self._counters.num_fast_path += order.is_urgent * len(states)
        view = self._cluster.decode(order.decode)
        number = view.begin_batch() if view and order.is_batch and states else 0
        self._assign(order.decode, states, order.is_batch, number, order.is_urgent)

    def candidates(self, found: Candidates) -> None:
        """Handles the pool's answer to a search. The requests that it found are no longer candidates."""
        states = [state for key in found.keys if (state := self._decode_queue.get(key))]
        view = self._cluster.decode(found.decode)
        if view:
            search = view.batch_search if found.is_batch else view.near_search
            search.answered(has_found=bool(found.keys))
        if view is None or view.is_draining:
            for state in states:
                self._pool.commit(state, is_candidate=True)
            return
        if found.is_batch and states:
            view.begin_batch(found.replaces)
        self._assign(
            found.decode, states, found.is_batch, view.batch_number if found.is_batch else found.batch
        )

    def _assign(
        self,
        decode: InstanceId,
        states: Sequence[RequestState],
        is_batch: bool,
        batch: int,
        is_urgent: bool = False,
    ) -> None:
        """Stages the requests, and offers the rest for a load from the pool at once. If a candidate had to wait for
        room in a staging buffer, an idle decode instance might wait for it."""
        staged = self._staging.stage(decode, states, is_batch, batch, is_urgent)
        if fetched := [state for state in states if state.key not in staged]:
            self._offers.offer(decode, fetched, is_batch, batch)
