"""What processes that come and go mean for the requests that they had."""

from __future__ import annotations

from alignedserve.protocol.messages import Hello, MakeSpare, UsePool, Welcome
from alignedserve.router.decode import DecodeSide
from alignedserve.router.entry import Entry, State
from alignedserve.router.fleet import Process, Search
from alignedserve.router.life import Life
from alignedserve.router.orphans import Orphans
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
        if hello.instance_id in life.fleet:
            raise RuntimeError(f"{hello.instance_id} connects with epoch {hello.epoch}, but is up already")
        life.fleet.add(hello)
        life.send(hello.instance_id, Welcome(self._epoch, life.config.silence_s))
        if hello.role == "kvpool":
            self._pool_connected(hello)
        elif self._segment and hello.instance_id in {each.instance_id for each in life.fleet.instances}:
            life.send(hello.instance_id, UsePool(self._segment))
        # a new chance for policies that found nothing to do
        life.pooled.num_changes += 1

    def closed(self, instance_id: InstanceId) -> None:
        process = self._life.fleet.remove(instance_id)
        if process is None:
            return
        if process.hello.role == "kvpool":
            self._pool_closed()
        for entry in list(self._life.entries.values()):
            if process.hello.role == "gateway" and entry.gateway == instance_id:
                self._life.end(entry)
            else:
                self._lost_by(entry, process)

    def _lost_by(self, entry: Entry, process: Process) -> None:
        instance_id = process.instance_id
        if entry.state is State.LEAVING:
            self._life.gone(entry, instance_id)
        elif entry.place == instance_id:
            self._life.counters.recoveries[process.hello.role] += 1
            self._life.recall(entry, gone_from=instance_id)
        elif entry.staged_at == instance_id:
            # the decode instance that was to pull it will report that this failed
            self._life.unstaged(entry)

    def _pool_closed(self) -> None:
        self._life.has_room_again()
        for view in self._life.fleet.decodes:
            view.batch_search, view.near_search = Search(), Search()
        for key in list(self._life.reserving):
            self._life.requeue(self._life.entries[key])

    def _pool_connected(self, hello: Hello) -> None:
        life = self._life
        if hello.segment != self._segment:
            self._segment = hello.segment
            for process in life.fleet.instances:
                life.send(process.instance_id, UsePool(self._segment))
        stored = {each.key: each for each in hello.inventory}
        # who asks for room comes last: it may be made of what others have not said yet that they need
        for entry in sorted(life.entries.values(), key=lambda entry: entry.state is State.MAKING_ROOM):
            found = stored.pop(entry.key, None)
            if found is None:
                entry.blocks, entry.num_cached = [], 0
            elif found.blocks != entry.blocks:
                entry.blocks, entry.num_cached = found.blocks, min(found.num_tokens, entry.num_tokens - 1)
            self._reconcile(entry)
        for orphan in stored.values():
            self._orphans.add(orphan, life.now)

    def _reconcile(self, entry: Entry) -> None:
        """With what the pool that came back has of it."""
        life = self._life
        match entry.state:
            case State.QUEUED:
                life.requeue(entry)
            case State.POOLED if entry.is_pooled:
                life.commit(entry, is_candidate=True)
            case State.STAGED | State.OFFERED if entry.is_pooled:
                life.commit(entry, is_candidate=False)
            case State.RUNNING:
                if entry.blocks:
                    life.send_pool(MakeSpare([entry.key]))
            case State.MAKING_ROOM:
                self._decode_side.make_room(entry)
            case State.PREFILLING | State.EVICTING if entry.blocks:
                pass
            case State.LEAVING:
                pass
            case _:
                # some of what it needs is lost
                life.counters.recoveries["kvpool"] += 1
                life.recall(entry)
