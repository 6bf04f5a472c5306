"""Moves victims from a decode instance back into the pool.

A decode instance names victims when it runs short of blocks. Each leaves when the pool has room for its KV. Until then
it stays where it is, and runs if it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.protocol.messages import DecodeReport, Evict, MakeSpare, Reserved
from alignedserve.router.clock import Clock
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.counters import Counters
from alignedserve.router.instance_views import ColocatedView, DecodeView
from alignedserve.router.outbox import Outbox
from alignedserve.router.pool_client import PoolClient
from alignedserve.router.pool_demand import PoolDemand
from alignedserve.router.recaller import Recaller
from alignedserve.router.request_state import RUNNING_PHASES, Phase, RequestState
from alignedserve.router.request_table import RequestTable
from alignedserve.router.requeuer import Requeuer
from alignedserve.router.transitions import PhaseTransitions
from alignedserve.types import InstanceId, RequestKey

# Victims without room in the pool wait while other requests run. If nothing has progressed for this many seconds, and
# for STANDSTILL_ITERATIONS iterations, one victim is dropped and computed again later.
STANDSTILL_S = 1.0
# The same for a colocated instance. It computes a victim again itself, and need not wait for room elsewhere.
STANDSTILL_COLOCATED_S = 0.1
STANDSTILL_ITERATIONS = 4


@dataclass(eq=False, slots=True)
class Eviction:
    _clock: Clock
    _cluster: ClusterState
    _requests: RequestTable
    _transitions: PhaseTransitions
    _requeuer: Requeuer
    _recaller: Recaller
    _demand: PoolDemand
    _pool: PoolClient
    _outbox: Outbox
    _counters: Counters

    def wanted(self, view: DecodeView, report: DecodeReport) -> None:
        """Handles the victims that the instance has named. A victim that it no longer names continues there, unless all
        requests are to leave."""
        instance_id, keys = view.instance_id, report.wants_evicted
        if report.news:
            view.progress_s = self._clock.now
        for key in view.refused.keys() - keys if view.refused and not view.is_draining else ():
            del view.refused[key]
            if state := self._requests.find(key, instance_id, Phase.MAKING_ROOM):
                self._transitions.enter(state, Phase.RUNNING, instance_id)
                self._pool.send(MakeSpare([key]))
        for key in keys:
            if state := self._requests.find(key, instance_id, Phase.RUNNING):
                self.begin(state)

    def begin(self, state: RequestState) -> None:
        """Starts to evict a running request. Does nothing while a prefill instance saves its KV: no other process may
        write to its pool blocks then."""
        if state.saving_at or state.instance_id is None:
            return
        self._counters.of(state.instance_id).num_preemptions += 1
        self._transitions.enter(state, Phase.MAKING_ROOM, state.instance_id)
        self.reserve(state)

    def dropped(self, view: DecodeView, keys: Sequence[RequestKey]) -> None:
        """Handles requests that the instance has dropped with their KV. They continue from what the pool has."""
        for key in keys:
            view.refused.pop(key, None)
            if state := self._requests.find(key, view.instance_id, *RUNNING_PHASES):
                self._counters.of(view.instance_id).num_preemptions += 1
                self._counters.num_recomputed += 1
                self._recaller.recall(state, forgotten_by=view.instance_id)

    def reserve(self, state: RequestState) -> None:
        if pool := self._cluster.pool:
            most = pool.hello.limits.num_blocks * pool.hello.limits.block_size
            self._pool.reserve(state, min(self._demand.num_tokens_to_evict(state), most))

    def reserved(self, state: RequestState, reserved: Reserved) -> None:
        view = self._cluster.decode(state.instance_id)
        if reserved.blocks is None:
            if self._requeuer.unpin_all():
                self.reserve(state)
            elif view and not state.is_rt and _lacks_room(view):
                # Best effort fills instances beyond the pool's room for it (see `PoolDemand`). Real time must not wait
                # until some of it ends.
                self._give_up(state)
            elif view:
                view.refused[state.key] = None
            return
        if view:
            view.refused.pop(state.key, None)
        state.blocks = reserved.blocks
        self._transitions.enter(state, Phase.EVICTING, state.instance_id)
        self._outbox.send(state.instance_id, Evict(state.key, state.blocks, state.num_cached))

    def evicted(self, view: DecodeView, key: RequestKey, num_tokens: int) -> None:
        """Puts an evicted request back into a queue. The pool has the KV of its first `num_tokens` tokens, and the
        instance has forgotten it."""
        if state := self._requests.find(key, view.instance_id, Phase.EVICTING):
            self._counters.of(view.instance_id).num_evictions += 1
            self._counters.num_evicted_for_rt += view.awaits_rt and not state.is_rt
            state.num_cached = num_tokens
            self._requeuer.requeue(state)

    def failed(self, sender: InstanceId, key: RequestKey) -> None:
        """Handles KV that did not reach the pool. Other requests may use the room made for it until it is requested
        again. If the instance still names the victim, that happens at once."""
        if state := self._requests.find(key, sender, Phase.EVICTING):
            self._transitions.enter(state, Phase.RUNNING, sender)
            self._pool.send(MakeSpare([key]))
            if (view := self._cluster.decode(sender)) and view.report:
                self.wanted(view, view.report)

    def retry(self) -> None:
        """Asks again for victims that found no room, if the pool may have some by now."""
        if not self._cluster.pool or not self._pool.take_victims_retry():
            return
        for view in self._cluster.all_decodes:
            if not view.refused:
                continue
            found = [self._requests.find(key, view.instance_id, Phase.MAKING_ROOM) for key in view.refused]
            victims = [state for state in found if state]
            view.refused = {state.key: None for state in victims}
            if victims and self._stands_still(view, victims):
                self._give_up_one(view, victims)
            else:
                for state in victims:
                    self.reserve(state)

    def _stands_still(self, view: DecodeView, victims: Sequence[RequestState]) -> bool:
        iteration_s = view.report.duration_s if view.report else 0.0
        least_s = STANDSTILL_COLOCATED_S if isinstance(view, ColocatedView) else STANDSTILL_S
        patience_s = max(least_s, STANDSTILL_ITERATIONS * iteration_s)
        since_s = max(view.progress_s, max(state.since_s for state in victims))
        return self._clock.now - since_s > patience_s

    def _give_up_one(self, view: DecodeView, victims: Sequence[RequestState]) -> None:
        """Drops the victim with the least to compute again, without saving its KV. All victims wait for each other, and
        no other request can free room."""
        victim = min(victims, key=lambda state: (state.is_rt, state.num_tokens))
        del view.refused[victim.key]
        view.progress_s = self._clock.now
        self._give_up(victim)

    def _give_up(self, victim: RequestState) -> None:
        self._counters.num_recomputed += 1
        self._recaller.recall(victim)


def _lacks_room(view: DecodeView) -> bool:
    """Returns whether real time waits for room at the instance."""
    is_short = view.num_available_blocks < 0 or view.num_available_slots < 0
    return view.awaits_rt and (is_short or isinstance(view, ColocatedView))
