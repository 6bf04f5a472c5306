"""The ways to a decode instance: with KV from the pool, or over a link, with KV that a prefill instance has. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from alignedserve.protocol.messages import Failed, MakeSpare, Offer, Stage, Unstage, Work
from alignedserve.router.leaving import Eviction, Recaller
from alignedserve.router.pool_client import PoolClient
from alignedserve.router.requests import Phase, RequestState, Staged
from alignedserve.router.state import RouterState
from alignedserve.router.transitions import PhaseTransitions
from alignedserve.router.views import PrefillView
from alignedserve.types import InstanceId, RequestKey

# ---- offers ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Offers:
    """Offers requests to decode instances, which admit them when they have room."""

    _router: RouterState
    _transitions: PhaseTransitions

    def offer(
        self,
        decode: InstanceId,
        states: Sequence[RequestState],
        is_batch: bool,
        batch: int,
        source: InstanceId | None = None,
    ) -> None:
        """Offers the requests. `batch`: see Offer. `source`: the prefill instance that has staged their KV, or holds it
        where it was computed; None: it is loaded from the pool, or computed."""
        for state in states:
            self._transitions.enter(state, Phase.OFFERED, decode)
            self.promise(decode, state, is_batch)
        stager, view = self._router.cluster.prefill(source), self._router.cluster.decode(decode)
        address = stager.hello.link if stager else ""
        replaces = bool(is_batch and view and view.is_batch_replacing)
        # A prefill instance has all of the KV, whatever the pool has by now.
        works = [state.work(state.num_tokens - 1 if source else None) for state in states]
        self._router.outbox.send(decode, Offer(works, is_batch, source, address, batch, replaces))

    def promise(self, decode: InstanceId, state: RequestState, is_batch: bool) -> None:
        """Counts the blocks that the request will need at the decode instance, including one more column."""
        if view := self._router.cluster.decode(decode):
            view.add_offered(state, is_batch, self._router.clock.now)


# ---- staging ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class StagedTransfers:
    """With a link, KV goes from the pool through the staging buffer of a prefill instance to a decode instance."""

    _router: RouterState
    _transitions: PhaseTransitions
    _recaller: Recaller
    _offers: Offers

    def stage(
        self,
        decode: InstanceId,
        states: Sequence[RequestState],
        is_batch: bool,
        batch: int,
        is_urgent: bool,
    ) -> set[RequestKey]:
        """Stages as many of the requests, in order, as there is room for. Returns their keys.

        Each request goes to the buffer that has most room at that moment, so that a decode instance receives KV over
        several links. Urgent requests are staged together, and only where they need not wait for others and prompts
        leave enough room.
        """
        stagers = self._stagers_for(decode, states, is_urgent)
        works: dict[InstanceId, list[Work]] = {}
        staged: set[RequestKey] = set()
        for state in states:
            if not stagers:
                break
            stager = max(stagers, key=partial(_preference, state))
            num_blocks = stager.blocks_to_stage(state)
            if num_blocks > stager.num_free_staging_blocks:
                continue
            self._router.link_health.staged(stager.instance_id, decode, state.key)
            self._transitions.stage(state, Staged(stager.instance_id, decode, is_batch, batch))
            stager.staging[state.key] = num_blocks
            if not self._router.link_health.may_stage(stager, decode):
                stagers.remove(stager)  # A link on trial takes only one request.
            self._offers.promise(decode, state, is_batch)
            works.setdefault(stager.instance_id, []).append(state.work())
            staged.add(state.key)
        for instance_id, each in works.items():
            self._router.outbox.send(instance_id, Stage(decode, each))
        return staged

    def _stagers_for(
        self, decode: InstanceId, states: Sequence[RequestState], is_urgent: bool
    ) -> list[PrefillView]:
        prefills = self._router.cluster.prefills if self._router.config.link != "host" else []
        stagers = [
            view
            for view in prefills
            if isinstance(view, PrefillView) and self._router.link_health.may_stage(view, decode)
        ]
        if not (is_urgent and stagers):
            return stagers
        emptiest = max(stagers, key=lambda view: view.num_free_staging_blocks)
        num_needed = sum(map(emptiest.blocks_to_stage, states))
        return [emptiest] if emptiest.has_room_at_once(num_needed) else []

    def staged(self, stager: InstanceId, keys: Sequence[RequestKey]) -> None:
        """Offers requests with staged KV to the decode instances that they are staged for. If the link has failed
        meanwhile, they are loaded from the pool."""
        groups: dict[tuple[Staged, InstanceId | None], list[RequestState]] = {}
        for key in keys:
            state = self._router.requests.find(key, stager, Phase.STAGED)
            if state and (staged := state.staged):
                can_pull = self._router.link_health.may_pull(stager, staged.decode, key)
                groups.setdefault((staged, stager if can_pull else None), []).append(state)
        for (staged, source), states in groups.items():
            view = self._router.cluster.decode(staged.decode)
            if view and not view.is_draining:
                self._offers.offer(staged.decode, states, staged.is_in_batch, staged.batch, source)
                if source is None:
                    self.unstage(states)
            else:
                for state in states:
                    self._recaller.recall(state)

    def unstage(self, states: Sequence[RequestState]) -> None:
        """Frees the room of staged copies in the buffers, because decode instances no longer need them."""
        unstaged: dict[InstanceId, list[RequestKey]] = {}
        for state in states:
            if state.staged:
                unstaged.setdefault(state.staged.at, []).append(state.key)
                self._transitions.unstage(state)
        for stager, keys in unstaged.items():
            if view := self._router.cluster.prefill(stager):
                for key in keys:
                    view.discard(key)
                self._router.outbox.send(stager, Unstage(keys))


def _preference(state: RequestState, stager: PrefillView) -> tuple[bool, int]:
    """Prefers idle instances for real time: an instance that computes reports only after its iteration."""
    return state.is_rt and not stager.pending.total, stager.num_free_staging_blocks


# ---- direct hand-over ------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class DirectHandOver:
    """Direct hand-over: a decode instance pulls real-time KV from the blocks in which the prompt was just computed,
    while the prefill instance saves it to the pool.

    A request is handed over directly if its prefill instance holds its KV, the policy has a decode instance for it, and
    the link between the two works. Its pool blocks stay reserved until the prefill instance has reported success or
    failure, or is gone (`RequestState.saving_at`). The request is not evicted before. If the decode instance loses it
    meanwhile, it continues from the pool after it is saved (`Recaller`)."""

    _router: RouterState
    _transitions: PhaseTransitions
    _offers: Offers
    _eviction: Eviction
    _pool: PoolClient

    def held(self, stager: PrefillView, keys: Sequence[RequestKey]) -> None:
        """Handles prompts that a prefill instance has just computed, and still holds. Each goes to a decode instance at
        once, or the prefill instance is told to release it."""
        unwanted = []
        for key in keys:
            # A request that is not found is finished or was recalled, and the instance was told so.
            if state := self._router.requests.find(key, stager.instance_id, Phase.PREFILLING):
                if decode := self._choose(stager, state):
                    self._hand_over(stager, decode, state)
                else:
                    unwanted.append(key)
        if unwanted:
            self._router.outbox.send(stager.instance_id, Unstage(unwanted))

    def _choose(self, stager: PrefillView, state: RequestState) -> InstanceId | None:
        if self._router.config.link == "host" or not (state.is_rt and state.output):
            return None
        views = [
            view
            for view in self._router.cluster.decodes
            if self._router.link_health.may_stage(stager, view.instance_id)
        ]
        chosen = self._router.policy.hand_over_to(state, views, self._router.island) if views else None
        return chosen.instance_id if chosen else None

    def _hand_over(self, stager: PrefillView, decode: InstanceId, state: RequestState) -> None:
        self._router.link_health.staged(stager.instance_id, decode, state.key)
        # A prefill instance frees no blocks of a prompt that it computes.
        span = stager.hello.limits.span
        stager.held[state.key] = span.num_groups * span.num_columns(state.num_tokens - 1)
        self._transitions.hand_over(state, stager.instance_id, decode)
        self._offers.offer(decode, [state], is_batch=False, batch=0, source=stager.instance_id)

    # ---- the copy to the pool ----------------------------------------------------------------------------------------

    def saved(self, stager: InstanceId, key: RequestKey, num_tokens: int) -> None:
        """Notes that the pool has the KV of the request's first `num_tokens` tokens: its prompt."""
        if (state := self._saved_by(stager, key)) is None:
            return
        self._transitions.end_saving(state)
        state.num_cached = num_tokens
        self._pool.commit(state, is_candidate=False)
        if state.phase is Phase.RUNNING:
            self._pool.send(MakeSpare([key]))
        self._may_leave(state)

    def failed(self, sender: InstanceId, failed: Failed) -> bool:
        """Handles a failed copy to the pool, if a decode instance has the request. Its prefill instance has forgotten
        it. Returns False for all other failures."""
        if (state := self._saved_by(sender, failed.key)) is None:
            return False
        if stager := self._router.cluster.prefill(sender):
            stager.discard(failed.key)
        self._transitions.unstage(state)
        self.not_saved(state)
        return True

    def not_saved(self, state: RequestState) -> None:
        """Notes that the prefill instance no longer saves the request's KV. Its decode instance has the only copy, or
        it is computed again."""
        self._transitions.end_saving(state)
        state.lose_blocks()
        self._pool.release([state.key])
        self._may_leave(state)

    def _may_leave(self, state: RequestState) -> None:
        """Evicts the request if its decode instance has named it as a victim meanwhile: the instance does so only
        once."""
        view = self._router.cluster.decode(state.instance_id)
        if state.phase is Phase.RUNNING and view and view.report and state.key in view.report.wants_evicted:
            self._eviction.wanted(view, view.report)

    def _saved_by(self, stager: InstanceId, key: RequestKey) -> RequestState | None:
        state = self._router.requests.get(key)
        is_other = state is None or state.saving_at != stager or state.phase is Phase.LEAVING
        return None if is_other else state
