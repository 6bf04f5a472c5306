"""What happens to requests when a process connects or disconnects, or when an instance could not execute an order."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.protocol.messages import Failed, Hello, UsePool, Welcome
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.counters import Counters
from alignedserve.router.decode_queue import DecodeQueue
from alignedserve.router.hand_over import HandOver
from alignedserve.router.instance_views import Process
from alignedserve.router.link_health import LinkHealth
from alignedserve.router.outbox import Outbox
from alignedserve.router.pool_recovery import PoolRecovery
from alignedserve.router.recaller import Recaller
from alignedserve.router.request_state import Phase, RequestState
from alignedserve.router.request_table import RequestTable
from alignedserve.router.transitions import PhaseTransitions
from alignedserve.types import InstanceId


@dataclass(eq=False, slots=True)
class Recovery:
    # The first message to each process.
    _welcome: Welcome
    _cluster: ClusterState
    _requests: RequestTable
    _decode_queue: DecodeQueue
    _transitions: PhaseTransitions
    _recaller: Recaller
    _pool_recovery: PoolRecovery
    _outbox: Outbox
    _counters: Counters
    _link_health: LinkHealth
    _hand_over: HandOver

    def connected(self, hello: Hello) -> None:
        if hello.instance_id in self._cluster:
            raise RuntimeError(f"{hello.instance_id} connects with epoch {hello.epoch}, but is already up")
        self._cluster.add(hello)
        self._outbox.send(hello.instance_id, self._welcome)
        segment = self._pool_recovery.segment
        if hello.role == "kvpool":
            self._pool_recovery.connected(hello)
        elif segment and hello.instance_id in {each.instance_id for each in self._cluster.instances}:
            self._outbox.send(hello.instance_id, UsePool(segment))
        # Lets policies that found nothing to do look again.
        self._decode_queue.num_changes += 1

    def closed(self, instance_id: InstanceId) -> None:
        process = self._cluster.remove(instance_id)
        if process is None:
            return
        self._link_health.forget(instance_id)
        if process.hello.role == "kvpool":
            self._pool_recovery.closed()
        for state in self._requests:
            if process.hello.role == "gateway" and state.gateway == instance_id:
                self._recaller.finish(state)
            else:
                self._lost_by(state, process)

    def _lost_by(self, state: RequestState, process: Process) -> None:
        instance_id = process.instance_id
        if state.phase is Phase.LEAVING:
            self._recaller.confirm(state, instance_id)
        elif state.instance_id == instance_id:
            self._counters.recoveries[process.hello.role] += 1
            self._recaller.recall(state, forgotten_by=instance_id)
        else:
            if state.staged_at == instance_id:
                # The decode instance that was to pull the KV from there will report a failure.
                self._transitions.unstage(state)
            if state.saving_at == instance_id:
                self._hand_over.not_saved(state)

    def failed(self, sender: InstanceId, failed: Failed) -> None:
        """Recalls a request with KV that did not reach an instance, or did not get from a prefill instance to the
        pool."""
        state = self._requests.find(failed.key, sender, Phase.PREFILLING, Phase.STAGED, Phase.OFFERED)
        if state is None:
            return
        if failed.what == "load":
            state.num_cached = 0
        self._recaller.recall(state, forgotten_by=sender)
