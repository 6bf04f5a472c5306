"""What follows when a process or the pool is lost and returns, or a copy of KV fails. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.kv.span import KvSpan
from alignedserve.protocol.messages import Failed, ForgetAll, Hello, MakeSpare, Stored, UsePool, Welcome
from alignedserve.router.adapters import Adapters
from alignedserve.router.clock import EventClock
from alignedserve.router.copies import DirectHandOver
from alignedserve.router.leaving import EndedAnswers, Eviction, Recaller, Requeuer
from alignedserve.router.pool_client import PoolClient
from alignedserve.router.requests import Phase, RequestState
from alignedserve.router.state import RouterState
from alignedserve.router.transitions import PhaseTransitions
from alignedserve.router.views import Process, Search
from alignedserve.types import InstanceId, RequestKey

# ---- KV without a request --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Orphan:
    stored: Stored
    span: KvSpan
    # When it was found: seconds on the router's clock.
    since_s: float


class Orphans:
    """KV in the pool of requests unknown to the router. Their gateways submit them again, or the KV is released."""

    def __init__(self, clock: EventClock, patience_s: float) -> None:
        """`patience_s`: seconds after which an orphan expires."""
        self._clock = clock
        self._patience_s = patience_s
        self._found: dict[RequestKey, _Orphan] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, stored: Stored, span: KvSpan) -> None:
        """Adds an orphan. `span`: which blocks are saved for a given number of tokens."""
        self._found[stored.key] = _Orphan(stored, span, self._clock.now)

    def claim(self, key: RequestKey, num_tokens: int) -> Stored | None:
        """Returns the KV from which a submitted request of `num_tokens` tokens continues; it is no longer an orphan. An
        earlier router may have received more of its tokens than the gateway did. Blocks that were only reserved do not
        count, because an instance may still be filling them."""
        orphan = self._found.get(key)
        if orphan is None or not orphan.stored.num_tokens or orphan.stored.is_new:
            return None
        del self._found[key]
        stored = orphan.stored
        return Stored(key, stored.blocks, orphan.span.num_usable(stored.num_tokens, num_tokens))

    def drop(self, key: RequestKey) -> None:
        """Removes an orphan of which the pool no longer has anything. Safe to repeat."""
        self._found.pop(key, None)

    def take_expired(self) -> list[RequestKey]:
        if not self._found:
            return []
        now = self._clock.now
        expired = [key for key, orphan in self._found.items() if now - orphan.since_s >= self._patience_s]
        for key in expired:
            del self._found[key]
        return expired


# ---- the pool --------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class PoolRecovery:
    """Handles the loss of the pool, its return, and KV that it has dropped."""

    _router: RouterState
    _requeuer: Requeuer
    _recaller: Recaller
    _eviction: Eviction
    _ended_answers: EndedAnswers
    _orphans: Orphans
    _pool: PoolClient
    # The shared memory segment of the last pool that connected.
    segment: str = ""

    def closed(self) -> None:
        self._pool.retry_refused()
        self._ended_answers.pool_closed()
        for view in self._router.cluster.all_decodes:
            view.batch_search, view.near_search = Search(), Search()
        for key in list(self._router.prefill_queue.reserving):
            self._requeuer.requeue(self._router.requests[key])

    def connected(self, hello: Hello) -> None:
        if hello.segment != self.segment:
            self.segment, self._pool.may_know_more = hello.segment, hello.knows_content
            for process in self._router.cluster.instances:
                self._router.outbox.send(process.instance_id, UsePool(self.segment))
        stored, span = {each.key: each for each in hello.inventory}, hello.limits.span
        # Requests that ask for room come last: the pool may make room from KV that other requests still need and have
        # not committed again yet.
        for state in sorted(self._router.requests, key=lambda state: state.phase is Phase.MAKING_ROOM):
            found = stored.pop(state.key, None)
            if found is None:
                state.lose_blocks()
            elif found.blocks != state.blocks:
                # The pool gave it these before it was lost, so they may be of an earlier era.
                state.is_alone |= self._router.era > 0
                state.blocks = found.blocks
                state.num_cached = span.num_usable(found.num_tokens, state.num_tokens)
                state.num_found = min(state.num_found, state.num_cached)
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
                self._router.counters.recoveries["kvpool"] += 1
                self._recaller.recall(state)

    def dropped(self, key: RequestKey) -> None:
        """Handles a request of which the pool no longer has anything."""
        self._orphans.drop(key)
        state = self._router.requests.get(key)
        if state is None:
            return
        state.lose_blocks()
        self._router.prefill_queue.pinned.pop(key, None)
        if state.phase is Phase.POOLED:
            self._requeuer.requeue(state)
        elif state.phase is Phase.RESERVING:
            self._router.prefill_queue.reserve(state)

    def release_expired_orphans(self) -> None:
        expired = self._orphans.take_expired()
        self._pool.release([key for key in expired if self._is_unused(key)])

    def _is_unused(self, key: RequestKey) -> bool:
        """Returns whether the blocks are still unused. The request may have come back, and its reservation may use them
        now."""
        state = self._router.requests.get(key)
        return state is None or (state.phase is Phase.QUEUED and not state.blocks)


# ---- processes -------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Recovery:
    """What happens to requests when a process connects or disconnects, or an instance could not execute an order."""

    _router: RouterState
    # The first message to each process.
    _welcome: Welcome
    _transitions: PhaseTransitions
    _recaller: Recaller
    _pool_recovery: PoolRecovery
    _hand_over: DirectHandOver
    _adapters: Adapters

    def connected(self, hello: Hello) -> None:
        if hello.instance_id in self._router.cluster:
            raise RuntimeError(f"{hello.instance_id} connects with epoch {hello.epoch}, but is already up")
        self._router.cluster.add(hello)
        self._router.outbox.send(hello.instance_id, self._welcome)
        self._adapters.connected(hello)
        segment = self._pool_recovery.segment
        is_instance = hello.instance_id in {each.instance_id for each in self._router.cluster.instances}
        if self._router.era and (is_instance or hello.role == "kvpool"):
            # It may not have been told when the era began.
            self._router.outbox.send(hello.instance_id, ForgetAll(self._router.era))
        if hello.role == "kvpool":
            self._pool_recovery.connected(hello)
        elif segment and is_instance:
            self._router.outbox.send(hello.instance_id, UsePool(segment))
        # Lets policies that found nothing to do look again.
        self._router.decode_queue.num_changes += 1

    def closed(self, instance_id: InstanceId) -> None:
        process = self._router.cluster.remove(instance_id)
        if process is None:
            return
        self._router.link_health.forget(instance_id)
        self._adapters.closed(instance_id)
        if process.hello.role == "kvpool":
            self._pool_recovery.closed()
        for state in self._router.requests:
            if process.hello.role == "gateway" and state.gateway == instance_id:
                self._recaller.finish(state)
            else:
                self._lost_by(state, process)

    def _lost_by(self, state: RequestState, process: Process) -> None:
        instance_id = process.instance_id
        if state.phase is Phase.LEAVING:
            self._recaller.confirm(state, instance_id)
        elif state.instance_id == instance_id:
            self._router.counters.recoveries[process.hello.role] += 1
            self._recaller.recall(state, forgotten_by=instance_id)
        else:
            if state.staged and state.staged.at == instance_id:
                # The decode instance that was to pull the KV from there will report a failure.
                self._transitions.unstage(state)
            if state.saving_at == instance_id:
                self._hand_over.not_saved(state)

    def failed(self, sender: InstanceId, failed: Failed) -> None:
        """Recalls a request with KV that did not reach an instance, or did not get from a prefill instance to the
        pool."""
        state = self._router.requests.find(failed.key, sender, Phase.PREFILLING, Phase.STAGED, Phase.OFFERED)
        if state is None:
            return
        # What is there may fail again, so it is computed instead. A request that needs no prefill asks again.
        must_compute = failed.what == "pull" and state.num_cached and not (state.is_pooled or state.saving_at)
        if failed.what == "load" or failed.wrong_block is not None or must_compute:
            state.num_cached, state.is_alone = 0, True
        self._recaller.recall(state, forgotten_by=sender)


# ---- copies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FailedCopy:
    state: RequestState
    # When the request entered the phase in which its copy failed.
    since_s: float
    sender: InstanceId
    failed: Failed


@dataclass(eq=False, slots=True)
class CopyRetries:
    """Failed copies of KV, kept until the router's next tick. The cause of a failure may persist, and immediate retries
    would run in a tight loop."""

    _router: RouterState
    _recovery: Recovery
    _eviction: Eviction
    _waiting: list[_FailedCopy] = field(default_factory=list)

    def add(self, sender: InstanceId, failed: Failed) -> None:
        state = self._router.requests.get(failed.key)
        if state and state.instance_id == sender:
            self._waiting.append(_FailedCopy(state, state.since_s, sender, failed))

    def retry(self) -> None:
        """Handles the failures of requests that are still in the phase in which their copy failed."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if (
                self._router.requests.get(each.failed.key) is not each.state
                or each.state.since_s != each.since_s
            ):
                continue
            if each.failed.what == "evict":
                self._eviction.failed(each.sender, each.failed.key)
            else:
                self._recovery.failed(each.sender, each.failed)
