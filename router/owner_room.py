"""Makes room on instances for real time of an owner that has less there than another one. Pure.

Policies evict best effort for real time. Real time that runs stays, whichever owner sent it. So where one owner has all
slots or blocks, its youngest requests are evicted with their KV until the request that waits fits. They leave only as
long as their owner then has at least as much as the other one. Slots are compared if those are short, and otherwise
tokens. Owners that want much end with equal parts, and nothing moves back and forth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from alignedserve.router.dispatch import DecodeDispatch
from alignedserve.router.leaving import Eviction, Recaller
from alignedserve.router.requests import RUNNING_PHASES, Phase, RequestState
from alignedserve.router.state import RouterState
from alignedserve.router.views import DecodeView
from alignedserve.scheduling.island import Assign
from alignedserve.types import InstanceId, RequestKey

# The most waiting requests for which one event makes room at an instance. The next event goes on.
MAX_NEWCOMERS = 16
# The iterations within which policies with classes evict best effort for real time, where they do.
ITERATIONS_TO_EVICT = 4


@dataclass(eq=False, slots=True)
class OwnerRoom:
    _router: RouterState
    _eviction: Eviction
    _recaller: Recaller
    _decode: DecodeDispatch
    # Requests for which room was made since the last tick, and which wait all the same: the instance has admitted
    # others first, or the pool had no room for a victim.
    _helped: set[RequestKey] = field(default_factory=set)

    def make(self, sender: InstanceId | None = None) -> None:
        """Called after an instance's report, and on each tick for all, when the policy has assigned what fits. Takes as
        long as an instance has requests."""
        cluster = self._router.cluster
        if not (self._router.prefill_queue.owners_compete and cluster.pool):
            self._helped.clear()
            return
        self._helped = {key for key in self._helped if sender and self._still_waits(key)}
        pooled = self._pooled()
        for view in cluster.decodes:
            if sender in (None, view.instance_id) and not view.refused:
                pooled = self._make(view, pooled)

    def _still_waits(self, key: RequestKey) -> bool:
        state = self._find(key)
        return state is not None and state.phase not in RUNNING_PHASES

    def _pooled(self) -> list[RequestState]:
        """Returns the soonest requests of each owner in the pool."""
        queue = self._router.decode_queue
        pooled: list[RequestState] = []
        for owner in queue.rt_owners():
            queue.show(owner)
            pooled += queue.soonest(MAX_NEWCOMERS, self._router.clock.now)
        queue.show(None)
        return pooled or [each for each in islice(queue, MAX_NEWCOMERS) if self._takes_part(each)]

    def _make(self, view: DecodeView, pooled: list[RequestState]) -> list[RequestState]:
        """Makes room for requests that were offered to the instance, or wait in the pool. Returns the pooled ones that
        still find none."""
        offered = [state for key in (*view.near, *view.batch) if (state := self._find(key))]
        by_owner: dict[str, list[RequestState]] = {}
        for state in (*offered, *pooled):
            by_owner.setdefault(state.owner, []).append(state)
        if not by_owner:
            return []
        running = [state for key in view.running if (state := self._router.requests.get(key))]
        room = _Room(view, running)
        chosen = []
        for owner in sorted(by_owner, key=room.num_slots_of.__getitem__):
            room.spares_best_effort = not self._has_waited(by_owner[owner][0], view)
            # Some may have been taken back by now.
            newcomers = [state for state in by_owner[owner] if not state.leaving]
            for newcomer in newcomers[:MAX_NEWCOMERS]:
                victims = room.make(newcomer, may_evict=newcomer.key not in self._helped)
                if victims is None:
                    break
                if victims:
                    self._helped.add(newcomer.key)
                    self._clear(victims, offered)
                chosen.append(newcomer)
        self._offer(view, [state for state in chosen if state.phase is Phase.POOLED])
        return [state for state in pooled if state not in chosen]

    def _clear(self, victims: list[RequestState], offered: list[RequestState]) -> None:
        """Evicts the victims. Takes back what their owners were offered there: it might be admitted in their place."""
        owners = {victim.owner for victim in victims}
        for victim in victims:
            self._eviction.begin(victim)
        for state in offered:
            if state.owner in owners and state.phase is Phase.OFFERED and not state.saving_at:
                self._recaller.recall(state)

    def _offer(self, view: DecodeView, pooled: Sequence[RequestState]) -> None:
        """Offers requests to an instance where all room is promised to others. They would take what becomes free."""
        waiting = [
            state
            for state in pooled
            if view.num_available_slots < 1 or view.num_available_blocks < view.blocks_to_run(state)
        ]
        if waiting:
            self._decode.take(Assign(view.instance_id, waiting, is_urgent=True))

    def _find(self, key: RequestKey) -> RequestState | None:
        state = self._router.requests.get(key)
        return state if state and not state.is_finished and self._takes_part(state) else None

    def _has_waited(self, state: RequestState, view: DecodeView) -> bool:
        """Returns whether the policy itself would have evicted best effort for the request by now, if it does so."""
        iteration_s = view.report.duration_s if view.report else 0.0
        is_policy_blind = self._router.policy.num_lines == 1
        return is_policy_blind or self._router.clock.now - state.since_s > ITERATIONS_TO_EVICT * iteration_s

    def _takes_part(self, state: RequestState) -> bool:
        """Returns whether it is real time. Policies without classes treat all requests alike."""
        return state.is_rt or self._router.policy.num_lines == 1


class _Room:
    """What is free at an instance, what becomes free, and what each owner has there to stay."""

    def __init__(self, view: DecodeView, running: Sequence[RequestState]) -> None:
        self._view = view
        # Best effort goes first, then the youngest: the last one here.
        self._staying = sorted(filter(_may_leave, running), key=lambda state: not state.is_rt)
        # Whether no best effort leaves, because the policy may still evict it.
        self.spares_best_effort = False
        leaving = [state for state in running if state.phase is not Phase.RUNNING]
        self._num_slots = view.hello.limits.max_num_seqs - len(view.running) + len(leaving)
        self._num_blocks = view.num_free_blocks + sum(map(self._blocks_of, leaving))
        self.num_slots_of: Counter[str] = Counter()
        self._num_tokens_of: Counter[str] = Counter()
        # Leaving requests count for no owner. Otherwise, still more of that owner's would leave meanwhile.
        for state in running:
            if state.phase is Phase.RUNNING:
                self._count(state, 1)

    def make(self, newcomer: RequestState, may_evict: bool) -> list[RequestState] | None:
        """Returns the requests that must leave so that the newcomer fits, and takes its room; None if they may not."""
        needed = self._blocks_of(newcomer)
        victims: list[RequestState] = []
        staying = [*self._staying]
        num_slots, num_blocks = self._num_slots - 1, self._num_blocks - needed
        while num_slots < 0 or num_blocks < 0:
            victim = self._victim(newcomer, is_slot_short=num_slots < 0) if may_evict else None
            if victim is None:
                self._staying = staying
                for each in victims:
                    self._count(each, 1)
                return None
            victims.append(victim)
            num_slots, num_blocks = num_slots + 1, num_blocks + self._blocks_of(victim)
        self._num_slots, self._num_blocks = num_slots, num_blocks
        self._count(newcomer, 1)
        return victims

    def _victim(self, newcomer: RequestState, is_slot_short: bool) -> RequestState | None:
        """Returns a request of the owner that has most, and counts it as gone; None if all may stay."""
        has = self.num_slots_of if is_slot_short else self._num_tokens_of

        def size(state: RequestState) -> int:
            return 1 if is_slot_short else state.num_tokens

        staying = [state for state in self._staying if state.is_rt or not self.spares_best_effort]
        richest = max((state.owner for state in staying), key=has.__getitem__, default=newcomer.owner)
        victim = next((state for state in reversed(staying) if state.owner == richest), newcomer)
        if has[richest] - size(victim) < has[newcomer.owner] + size(newcomer):
            return None
        self._staying.remove(victim)
        self._count(victim, -1)
        return victim

    def _count(self, state: RequestState, sign: int) -> None:
        self.num_slots_of[state.owner] += sign
        self._num_tokens_of[state.owner] += sign * state.num_tokens

    def _blocks_of(self, state: RequestState) -> int:
        """Returns the blocks that it has here, or will have with its next token."""
        return self._view.hello.limits.span.num_held(state.num_tokens, state.num_tokens + 1)


def _may_leave(state: RequestState) -> bool:
    return state.phase is Phase.RUNNING and not (state.saving_at or state.is_embedding)
