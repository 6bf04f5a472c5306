"""Which waiting requests go to which instance: prompts to prefill, requests in the pool to decode. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from alignedserve.protocol.messages import Candidates, FindNear, FormBatch, Prefill, Reserved
from alignedserve.router.copies import Offers, StagedTransfers
from alignedserve.router.leaving import Requeuer
from alignedserve.router.pool_client import PoolClient
from alignedserve.router.queues import OTHERS
from alignedserve.router.requests import Phase, RequestState
from alignedserve.router.state import RouterState
from alignedserve.router.transitions import PhaseTransitions
from alignedserve.router.views import ColocatedView, PrefillView
from alignedserve.scheduling import routing
from alignedserve.scheduling.island import Assign, RoutedRequest
from alignedserve.scheduling.prefixes import TOKENS_PER_HASH, num_to_compute
from alignedserve.types import InstanceId

# ---- prompts ---------------------------------------------------------------------------------------------------------


# The most requests that one event starts. The pool's answers are the next events.
MAX_STARTS = 16


@dataclass(eq=False, slots=True)
class PrefillDispatch:
    """Starts prefills: reserves room in the pool, then sends the prompt to an instance."""

    _router: RouterState
    _transitions: PhaseTransitions
    _requeuer: Requeuer
    _offers: Offers
    _pool: PoolClient

    def start(self) -> None:
        if not (self._router.prefill_queue and self._router.cluster.pool and self._router.cluster.prefills):
            return
        chosen = chain(self._router.policy.start(self._router.island_for_prompts), self._in_own_share())
        for request in islice(chosen, MAX_STARTS):
            state = self._router.requests[request.key]
            # A prompt that runs where it is computed needs room in the pool only when it is evicted.
            finds_only = self._router.cluster.is_colocated
            if state.is_embedding or (finds_only and not (state.blocks or self._pool.may_find(state))):
                self._compute(state)
                continue
            self._transitions.enter(state, Phase.RESERVING)
            if not finds_only and self._pool.brings_prefix(state) and not _ends_at_once(state):
                self._router.prefill_queue.prefixes.add(state)
            self._pool.reserve(state, _num_tokens_to_reserve(state), finds_only)

    def _in_own_share(self) -> Iterator[RoutedRequest]:
        """Starts real time of owners that have less under way than their part. Prompts of others, which wait at the
        instances, may fill what the policy starts ahead."""
        queue, line = self._router.prefill_queue, self._router.policy.line(True)
        if not queue.owners_compete:
            return
        for owner in queue.rt_owners():
            while not queue.is_refused(line) and self._has_share_left(owner):
                request = queue.first(line, self._router.clock.now, owner)
                if request is None:
                    break
                queue.take(request)
                yield request

    def _has_share_left(self, owner: str) -> bool:
        """Returns whether the owner has less than its part of colocated instances' slots, or else of the window of what
        is started ahead. Beyond a full window, all owners together start at most another one."""
        queue, cluster = self._router.prefill_queue, self._router.cluster
        # There may be none with real time.
        num_owners = max(queue.turns(True).num_owners, 1)
        if cluster.is_colocated:
            num_slots = sum(view.hello.limits.max_num_seqs for view in cluster.decodes)
            return queue.num_under_way(owner) < num_slots // num_owners
        window = routing.window(cluster, self._router.policy.config.prefill_window)
        return all(
            num_own * num_owners < most and num_all < 2 * most
            for most, num_own, num_all in zip(window, self._ahead(owner), self._ahead(None), strict=True)
        )

    def _ahead(self, owner: str | None) -> tuple[int, int]:
        """Returns the tokens and requests in the line of real time that were started and are not computed. `owner`:
        only this owner's."""
        line = self._router.policy.line
        classes = [is_rt for is_rt in (True, False) if line(is_rt) == line(True)]
        pending = (view.pending for view in self._router.cluster.prefills)
        started = [self._router.prefill_queue.reserving, *pending]
        return (
            sum(counts.sum(each, owner) for counts in started for each in classes),
            sum(counts.count(each, owner) for counts in started for each in classes),
        )

    def reserved(self, state: RequestState, reserved: Reserved) -> None:
        if reserved.blocks is None:
            self._refused(state)
            return
        self._pool.take(state, reserved)
        self._router.prefill_queue.granted(state)
        self._router.prefill_queue.prefix_found(state)
        # If no KV in these blocks is usable, it gets others: these may be shared, and are not to be written again.
        is_usable = state.num_cached or not reserved.num_tokens
        if self._router.cluster.prefills and not state.is_pooled and is_usable and self._is_enough(state):
            self._compute(state)
        else:
            self._requeuer.requeue(state)

    def _is_enough(self, state: RequestState) -> bool:
        """Returns whether the reserved room holds all of the request's tokens that need it. It does not if the request
        was pooled, and the pool has dropped its KV meanwhile."""
        pool = self._router.cluster.pool
        num_tokens = state.num_cached if self._router.cluster.is_colocated else state.num_tokens
        return pool is not None and len(state.blocks) * pool.hello.limits.block_size >= num_tokens

    def _refused(self, state: RequestState) -> None:
        """Handles a refused reservation. Real time takes the room that is pinned, and asks again at once. So does a
        request with some KV in the pool: otherwise it would wait forever for the other pinned ones."""
        if (state.is_rt or state.num_cached) and self._requeuer.unpin_all():
            self._pool.reserve(state, _num_tokens_to_reserve(state))
        else:
            self._router.prefill_queue.refused(state)
            self._requeuer.requeue(state)

    def _compute(self, state: RequestState) -> None:
        """Sends the prompt to the instance that the policy chooses."""
        view, num_known = self._choose(state)
        num_pending = num_to_compute(state.num_missing, num_known)
        if isinstance(view, ColocatedView):
            self._offers.offer(view.instance_id, [state], is_batch=False, batch=0)
        else:
            if not view.hello.limits.saves_whole:
                state.note_gaps(state.num_tokens, view.hello.limits.span)
            self._transitions.enter(state, Phase.PREFILLING, view.instance_id)
            self._router.outbox.send(view.instance_id, Prefill([state.work()]))
            self._pool.note_writes(state)
        view.pending.put(state.key, num_pending, state.is_rt, state.owner)

    def _choose(self, state: RequestState) -> tuple[PrefillView | ColocatedView, int]:
        """Returns the instance, and the number of prompt tokens that its prefix cache may hold."""
        views = self._router.cluster.prefills
        hashes = state.prefix_hashes if views[0].hello.limits.enable_prefix_caching else []

        def num_known(instance_id: InstanceId) -> int:
            view = self._router.cluster.computing(instance_id)
            if view is None:
                return 0
            num_own = view.prompts.prefix_affinity.num_cached_tokens(hashes)
            # What the pool has is loaded from there, wherever the prompt goes. An instance that has about as much need
            # not load it, and is chosen among equals.
            has_as_much = num_own > 0 and num_own + TOKENS_PER_HASH > state.num_cached > 0
            is_full = isinstance(view, ColocatedView) and view.num_available_slots <= 0
            return max(num_own - state.num_cached, int(has_as_much and not is_full))

        chosen = self._router.policy.place(
            state, views, lambda view: num_known(view.instance_id), self._router.island
        )
        view = next(view for view in views if view is chosen)
        found = view, num_known(view.instance_id)
        view.prompts.prefix_affinity.add(hashes)
        return found


def _ends_at_once(state: RequestState) -> bool:
    """Returns whether the next token is the request's last. Its KV is then not saved."""
    return state.request.params.max_tokens == len(state.output) + 1


def _num_tokens_to_reserve(state: RequestState) -> int:
    """Returns the number of tokens to reserve room for. A pooled request asks only for the KV that it already has
    there, because the pool can't refuse that. After a refusal it would not be known whether that KV still exists."""
    return state.num_cached if state.is_pooled else state.num_tokens


# ---- pooled requests -------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class DecodeDispatch:
    """Assigns requests that wait in the pool to decode instances, as the policy decides."""

    _router: RouterState
    _staging: StagedTransfers
    _offers: Offers
    _pool: PoolClient
    # Tokens of others that passed an owner in turn since real time of it was last assigned.
    _passed: Counter[str] = field(default_factory=Counter)

    def assign(self) -> None:
        if not self._router.cluster.pool:
            return
        queue = self._router.decode_queue
        in_turn = queue.rt_owners()[0] if queue.competes else None
        self._assign_shown()
        if not queue.real_time:
            self._passed.clear()
        # If the owner in turn has got all that it wanted, it is the turn of the next one in the next event.
        first, *others = queue.rt_owners() if queue.competes else [None]
        if first is None or first != in_turn or not self._may_be_passed(first):
            return
        for owner in filter(None, others):
            queue.show(owner)
            self._assign_shown(passing=first)
        queue.show(None)

    def _may_be_passed(self, owner: str) -> bool:
        """Returns whether others may try, because real time of the owner in turn fits nowhere now. Its first request
        must not wait forever for room that others take."""
        first = next(iter(self._router.decode_queue.real_time))
        has_room = any(
            view.num_slots_for_rt > 0 and view.num_blocks_for_rt > 0 for view in self._router.cluster.decodes
        )
        return has_room and self._passed[owner] < OTHERS * first.num_tokens

    def _assign_shown(self, passing: str | None = None) -> None:
        """Assigns what the policy chooses of the requests that the queue shows. `passing`: the owner in turn, which
        others pass with real time."""
        is_search_left_out = False
        for order in self._router.policy.decide(self._router.island):
            if isinstance(order, Assign):
                self._take(order, passing)
            elif passing is not None or self._router.decode_queue.competes:
                is_search_left_out = True
                self._leave_out(order)
            else:
                self._pool.send(order)
        if is_search_left_out:
            waiting = routing.real_time_first(self._router.decode_queue)
            for each in routing.assign_in_order(waiting, self._router.cluster.decodes):
                self._take(each, passing)

    def _take(self, order: Assign, passing: str | None) -> None:
        if passing is not None:
            order = replace(order, requests=[each for each in order.requests if each.is_rt])
            self._passed[passing] += sum(each.num_tokens for each in order.requests)
        elif self._passed:
            for each in order.requests:
                if each.is_rt:
                    self._passed.pop(each.owner, None)
        if order.requests:
            self.take(order)

    def _leave_out(self, search: FormBatch | FindNear) -> None:
        """Answers a search that the pool must not see: it would find real time of all owners."""
        if view := self._router.cluster.decode(search.decode):
            found = view.batch_search if isinstance(search, FormBatch) else view.near_search
            found.answered(has_found=True)

    def take(self, order: Assign) -> None:
        """Offers requests that wait in the pool."""
        states = [
            state for request in order.requests if (state := self._router.decode_queue.get(request.key))
        ]
        if len(states) < len(order.requests):
            raise RuntimeError(
                f"{order.decode}: offered requests are not in the pool, or one is offered twice"
            )
        for state in states:
            self._pool.commit(state, is_candidate=False)
        self._router.counters.num_fast_path += order.is_urgent * len(states)
        view = self._router.cluster.decode(order.decode)
        number = view.begin_batch() if view and order.is_batch and states else 0
        self._assign(order.decode, states, order.is_batch, number, order.is_urgent)

    def candidates(self, found: Candidates) -> None:
        """Handles the pool's answer to a search. The requests that it found are no longer candidates."""
        states = [state for key in found.keys if (state := self._router.decode_queue.get(key))]
        view = self._router.cluster.decode(found.decode)
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
