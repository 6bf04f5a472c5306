"""What processes that come and go mean for the requests that they had."""

from __future__ import annotations

from alignedserve.protocol.messages import Hello, MakeSpare, UsePool, Welcome
from alignedserve.router.cluster_state import Process, Search
from alignedserve.router.decode import DecodeSide
from alignedserve.router.life import Life
from alignedserve.router.orphans import Orphans
from alignedserve.router.request_state import Phase, RequestState
from alignedserve.types import Epoch, InstanceId


class Recovery:
    def __init__(self, life: Life, decode_side: DecodeSide, orphans: Orphans, epoch: Epoch) -> None:
        self._life = life
        self._decode_side = decode_side
        self._orphans = orphans
        self._epoch = epoch
        self._segment = ""

    def connected(self, hello: Hello) -> None:
        life = self._life
        if hello.instance_id in life.cluster:
            raise RuntimeError(f"{hello.instance_id} connects with epoch {hello.epoch}, but is up already")
        life.cluster.add(hello)
        life.send(hello.instance_id, Welcome(self._epoch, life.config.silence_s))
        if hello.role == "kvpool":
            self._pool_connected(hello)
        elif self._segment and hello.instance_id in {each.instance_id for each in life.cluster.instances}:
            life.send(hello.instance_id, UsePool(self._segment))
        # a new chance for policies that found nothing to do
        life.decode_queue.num_changes += 1

    def closed(self, instance_id: InstanceId) -> None:
        process = self._life.cluster.remove(instance_id)
        if process is None:
            return
        if process.hello.role == "kvpool":
            self._pool_closed()
        for state in list(self._life.requests.values()):
            if process.hello.role == "gateway" and state.gateway == instance_id:
                self._life.end(state)
            else:
                self._lost_by(state, process)

    def _lost_by(self, state: RequestState, process: Process) -> None:
        instance_id = process.instance_id
        if state.phase is Phase.LEAVING:
            self._life.forgotten_by(state, instance_id)
        elif state.place == instance_id:
            self._life.counters.recoveries[process.hello.role] += 1
            self._life.recall(state, gone_from=instance_id)
        elif state.staged_at == instance_id:
            # the decode instance that was to pull it will report that this failed
            self._life.unstaged(state)

    def _pool_closed(self) -> None:
        self._life.has_room_again()
        for view in self._life.cluster.decodes:
            view.batch_search, view.near_search = Search(), Search()
        for key in list(self._life.reserving):
            self._life.requeue(self._life.requests[key])

    def _pool_connected(self, hello: Hello) -> None:
        life = self._life
        if hello.segment != self._segment:
            self._segment = hello.segment
            for process in life.cluster.instances:
                life.send(process.instance_id, UsePool(self._segment))
        stored = {each.key: each for each in hello.inventory}
        # who asks for room comes last: it may be made of what others have not said yet that they need
        for state in sorted(life.requests.values(), key=lambda state: state.phase is Phase.MAKING_ROOM):
            found = stored.pop(state.key, None)
            if found is None:
                state.blocks, state.num_cached = [], 0
            elif found.blocks != state.blocks:
                state.blocks, state.num_cached = found.blocks, min(found.num_tokens, state.num_tokens - 1)
            self._reconcile(state)
        for orphan in stored.values():
            self._orphans.add(orphan, life.now)

    def _reconcile(self, state: RequestState) -> None:
        """With what the pool that came back has of it."""
        life = self._life
        match state.phase:
            case Phase.QUEUED:
                life.requeue(state)
            case Phase.POOLED if state.is_pooled:
                life.commit(state, is_candidate=True)
            case Phase.STAGED | Phase.OFFERED if state.is_pooled:
                life.commit(state, is_candidate=False)
            case Phase.RUNNING:
                if state.blocks:
                    life.send_pool(MakeSpare([state.key]))
            case Phase.MAKING_ROOM:
                self._decode_side.make_room(state)
            case Phase.PREFILLING | Phase.EVICTING if state.blocks:
                pass
            case Phase.LEAVING:
                pass
            case _:
                # some of what it needs is lost
                life.counters.recoveries["kvpool"] += 1
                life.recall(state)
