"""How a request leaves an instance: it is evicted to the pool or taken back, and waits in a queue again; or it has
ended, and the pool keeps its KV. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.protocol.messages import Abort, DecodeReport, Evict, MakeSpare, Release, Reserved, Unstage
from alignedserve.router.pool_client import PoolClient
from alignedserve.router.requests import RUNNING_PHASES, Leaving, Phase, RequestState
from alignedserve.router.state import RouterState
from alignedserve.router.transitions import PhaseTransitions
from alignedserve.router.views import ColocatedView, DecodeView
from alignedserve.types import InstanceId, RequestKey

# ---- back into a queue -----------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Requeuer:
    """Puts requests that no instance has back into a queue: for decode if the pool has all of their KV, otherwise for
    prefill."""

    _router: RouterState
    _transitions: PhaseTransitions
    _pool: PoolClient

    def requeue(self, state: RequestState) -> None:
        """Continues the request with what the pool has of it."""
        if state.is_pooled:
            self._transitions.enter(state, Phase.POOLED)
            self._pool.commit(state, is_candidate=True)
        else:
            self.queue_prefill(state)

    def queue_prefill(self, state: RequestState) -> None:
        """Queues the request for prefill, where it waits for room in the pool. By the time that is granted, the pool
        may have dropped the request's current KV."""
        state.num_cached = state.num_reusable
        self._transitions.enter(state, Phase.QUEUED)
        self._router.prefill_queue.push(state, self._router.policy.urgency(state, self._router.island))
        self._pin_or_free(state)

    def _pin_or_free(self, state: RequestState) -> None:
        """Makes a queued request's KV in the pool a spare, because requests before it might otherwise wait forever for
        that room. The exception is KV that the policy pins. Even that can be taken by real time and by victims
        (`unpin_all`)."""
        if state.num_cached:
            # Only committed KV can be a spare, and a request that was evicted halfway has committed nothing yet.
            self._pool.commit(state, is_candidate=False)
            if state.num_cached > state.num_found and self._router.policy.pins(state):
                self._router.prefill_queue.pinned[state.key] = state
                self._router.demand.add(state)
            else:
                self._pool.send(MakeSpare([state.key]))
        elif state.blocks:
            state.lose_blocks()
            self._pool.release([state.key])

    def unpin_all(self) -> bool:
        """Makes all pinned KV in the pool spare. Returns whether there was any. The caller asks for that room at once,
        and real time that waits may ask too. Other best effort must not: it would pin its KV again, and take turns with
        the caller."""
        pinned = self._router.prefill_queue.take_pinned()
        if pinned:
            self._pool.send(MakeSpare([state.key for state in pinned]))
            self._router.prefill_queue.clear_refusals_of_rt()
        for state in pinned:
            self._router.demand.discard(state)
        return bool(pinned)


# ---- taken back ------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Recaller:
    """Takes requests back from the instances that have them.

    A request's pool blocks are released or reused only when no instance can touch them any more. An instance that was
    told to forget the request confirms that (`Gone`), or dies. Until then the request is LEAVING."""

    _router: RouterState
    _transitions: PhaseTransitions
    _requeuer: Requeuer
    _pool: PoolClient

    def recall(self, state: RequestState, forgotten_by: InstanceId | None = None) -> None:
        """Takes the request back from wherever it is. It continues from the pool. `forgotten_by`: an instance that has
        already forgotten it."""
        if state.saving_at and forgotten_by == state.instance_id and not state.is_finished:
            self._await_saved(state, state.saving_at)
            return
        if state.phase is Phase.MAKING_ROOM and state.reserve_number and not state.is_finished:
            # The pool may still answer with reserved blocks, which nothing else would release. It may also have dropped
            # what the request had there, and reserved other blocks since.
            state.lose_blocks()
            self._pool.send(Release([state.key]))
        staged_at = state.staged.at if state.staged else None
        having = dict.fromkeys(each for each in (state.instance_id, staged_at, state.saving_at) if each)
        pending_aborts = [each for each in having if each != forgotten_by and each in self._router.cluster]
        stager = self._router.cluster.prefill(staged_at)
        if stager and stager.discard(state.key):
            self._router.counters.of(stager.instance_id).num_spills += not state.is_finished
        if not pending_aborts:
            self._has_left(state)
            return
        self._transitions.leave(state, Leaving(pending_aborts))
        for instance_id in pending_aborts:
            self._router.outbox.send(instance_id, Abort([state.key]))

    def _await_saved(self, state: RequestState, saver: InstanceId) -> None:
        """Waits for the prefill instance to save the KV of a request that its decode instance has lost. The request
        continues from the pool after that."""
        if state.staged and (stager := self._router.cluster.prefill(state.staged.at)):
            stager.discard(state.key)
            self._router.outbox.send(stager.instance_id, Unstage([state.key]))
        self._transitions.enter(state, Phase.PREFILLING, saver)
        if view := self._router.cluster.prefill(saver):
            # Nothing of it is left to compute there.
            view.pending.put(state.key, 0, state.is_rt, state.owner)

    def finish(self, state: RequestState, forgotten_by: InstanceId | None = None) -> None:
        """Ends the request everywhere, because its client has its answer, or is gone."""
        self._transitions.finish(state)
        self._router.output.discard(state.key)
        if state.phase is not Phase.LEAVING:
            self.recall(state, forgotten_by)

    def confirm(self, state: RequestState, instance_id: InstanceId) -> None:
        """Handles the confirmation that an instance has forgotten the request, or the death of that instance."""
        if state.leaving and instance_id in state.leaving.pending_aborts:
            state.leaving.pending_aborts.remove(instance_id)
            if not state.leaving.pending_aborts:
                self._has_left(state)

    def _has_left(self, state: RequestState) -> None:
        if not state.is_finished:
            self._requeuer.requeue(state)
            return
        self._transitions.enter(state, Phase.LEAVING)
        self._router.demand.discard(state)
        self._router.requests.remove(state)
        self._pool.release([state.key])


# ---- ended -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class EndedAnswers:
    """Keeps the KV of complete answers in the pool, where the next turns of chats find it.

    The decode instance holds the request's blocks until it is told to save them (`Evict`) or to forget them (`Abort`).
    For everything else the request is LEAVING."""

    _router: RouterState
    _transitions: PhaseTransitions
    _recaller: Recaller
    _pool: PoolClient

    def ended(self, state: RequestState, decode: InstanceId) -> None:
        """Handles the end of an answer of which the instance still holds the KV."""
        is_at_rest = state.phase is Phase.RUNNING and not state.saving_at
        if not (is_at_rest and self._pool.reserve_answer(state)):
            self._recaller.finish(state)
            return
        self._transitions.finish(state)
        self._router.output.discard(state.key)
        self._transitions.leave(state, Leaving([decode], wants_answer_kept=True))
        self._router.demand.discard(state)

    def reserved(self, state: RequestState, reserved: Reserved) -> None:
        if (leaving := state.leaving) and leaving.wants_answer_kept:
            if reserved.blocks is None or state.is_alone:
                self._let_go(state.key, leaving)
                return
            leaving.wants_answer_kept = False
            (decode,) = leaving.pending_aborts
            self._router.outbox.send(decode, Evict(state.key, reserved.blocks, reserved.num_tokens))

    def saved(self, view: DecodeView, key: RequestKey, num_tokens: int) -> None:
        """Lets later prompts find the answer. The pool then has it, but the request no longer does."""
        state, decode = self._router.requests.get(key), view.instance_id
        if state and state.leaving and state.is_finished and decode in state.leaving.pending_aborts:
            state.num_cached = num_tokens
            state.note_gaps(num_tokens, view.hello.limits.span)
            if not state.is_alone:
                self._pool.commit(state, is_candidate=False)
            self._recaller.confirm(state, decode)

    def pool_closed(self) -> None:
        """Lets go of the answers for which the pool was asked for room, because it will not answer."""
        for state in self._router.requests:
            if (leaving := state.leaving) and leaving.wants_answer_kept:
                self._let_go(state.key, leaving)

    def _let_go(self, key: RequestKey, leaving: Leaving) -> None:
        leaving.wants_answer_kept = False
        for decode in leaving.pending_aborts:
            self._router.outbox.send(decode, Abort([key]))


# ---- evicted ---------------------------------------------------------------------------------------------------------


# Victims without room in the pool wait while other requests run. If nothing has progressed for this many seconds, and
# for STANDSTILL_ITERATIONS iterations, one victim is dropped and computed again later.
STANDSTILL_S = 1.0
# The same for a colocated instance. It computes a victim again itself, and need not wait for room elsewhere.
STANDSTILL_COLOCATED_S = 0.1
STANDSTILL_ITERATIONS = 4


@dataclass(eq=False, slots=True)
class Eviction:
    """Moves victims from a decode instance back into the pool.

    A decode instance names victims when it runs short of blocks. Each leaves when the pool has room for its KV. Until
    then it stays where it is, and runs if it can."""

    _router: RouterState
    _transitions: PhaseTransitions
    _requeuer: Requeuer
    _recaller: Recaller
    _pool: PoolClient

    def wanted(self, view: DecodeView, report: DecodeReport) -> None:
        """Handles the victims that the instance has named. A victim that it no longer names continues there, unless all
        requests are to leave."""
        instance_id, keys = view.instance_id, report.wants_evicted
        if report.news:
            view.progress_s = self._router.clock.now
        for key in view.refused.keys() - keys if view.refused and not view.is_draining else ():
            del view.refused[key]
            if state := self._router.requests.find(key, instance_id, Phase.MAKING_ROOM):
                self._transitions.enter(state, Phase.RUNNING, instance_id)
                if state.reserve_number:
                    # The pool may have granted it meanwhile.
                    self._pool.note_writes(state)
                self._pool.send(MakeSpare([key]))
        for key in keys:
            if state := self._router.requests.find(key, instance_id, Phase.RUNNING):
                self.begin(state)

    def begin(self, state: RequestState) -> None:
        """Starts to evict a running request. Does nothing while a prefill instance saves its KV: no other process may
        write to its pool blocks then."""
        if state.saving_at or state.instance_id is None:
            return
        self._router.counters.of(state.instance_id).num_preemptions += 1
        self._transitions.enter(state, Phase.MAKING_ROOM, state.instance_id)
        self.reserve(state)

    def dropped(self, view: DecodeView, keys: Sequence[RequestKey]) -> None:
        """Handles requests that the instance has dropped with their KV. They continue from what the pool has."""
        for key in keys:
            view.refused.pop(key, None)
            if state := self._router.requests.find(key, view.instance_id, *RUNNING_PHASES):
                self._router.counters.of(view.instance_id).num_preemptions += 1
                self._router.counters.num_recomputed += 1
                self._recaller.recall(state, forgotten_by=view.instance_id)

    def reserve(self, state: RequestState) -> None:
        if pool := self._router.cluster.pool:
            most = pool.hello.limits.num_blocks * pool.hello.limits.block_size
            self._pool.reserve(state, min(self._router.demand.num_tokens_to_evict(state), most))

    def reserved(self, state: RequestState, reserved: Reserved) -> None:
        view = self._router.cluster.decode(state.instance_id)
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
        self._pool.take(state, reserved)
        self._transitions.enter(state, Phase.EVICTING, state.instance_id)
        self._router.outbox.send(state.instance_id, Evict(state.key, state.blocks, state.num_cached))
        self._pool.note_writes(state)

    def evicted(self, view: DecodeView, key: RequestKey, num_tokens: int) -> None:
        """Puts an evicted request back into a queue. The pool has the KV of its first `num_tokens` tokens, and the
        instance has forgotten it."""
        if state := self._router.requests.find(key, view.instance_id, Phase.EVICTING):
            self._router.counters.of(view.instance_id).num_evictions += 1
            self._router.counters.num_evicted_for_rt += view.awaits_rt and not state.is_rt
            state.num_cached = num_tokens
            state.note_gaps(num_tokens, view.hello.limits.span)
            self._requeuer.requeue(state)

    def failed(self, sender: InstanceId, key: RequestKey) -> None:
        """Handles KV that did not reach the pool. Other requests may use the room made for it until it is requested
        again. If the instance still names the victim, that happens at once."""
        if state := self._router.requests.find(key, sender, Phase.EVICTING):
            self._transitions.enter(state, Phase.RUNNING, sender)
            self._pool.send(MakeSpare([key]))
            if (view := self._router.cluster.decode(sender)) and view.report:
                self.wanted(view, view.report)

    def retry(self) -> None:
        """Asks again for victims that found no room, if the pool may have some by now."""
        if not self._router.cluster.pool or not self._pool.take_victims_retry():
            return
        for view in self._router.cluster.all_decodes:
            if not view.refused:
                continue
            found = [
                self._router.requests.find(key, view.instance_id, Phase.MAKING_ROOM) for key in view.refused
            ]
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
        return self._router.clock.now - since_s > patience_s

    def _give_up_one(self, view: DecodeView, victims: Sequence[RequestState]) -> None:
        """Drops the victim with the least to compute again, without saving its KV. All victims wait for each other, and
        no other request can free room."""
        victim = min(victims, key=lambda state: (state.is_rt, state.num_tokens))
        del view.refused[victim.key]
        view.progress_s = self._router.clock.now
        self._give_up(victim)

    def _give_up(self, victim: RequestState) -> None:
        self._router.counters.num_recomputed += 1
        self._recaller.recall(victim)


def _lacks_room(view: DecodeView) -> bool:
    """Returns whether real time waits for room at the instance."""
    is_short = view.num_available_blocks < 0 or view.num_available_slots < 0
    return view.awaits_rt and (is_short or isinstance(view, ColocatedView))
