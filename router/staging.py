"""With a link, KV goes from the pool through the staging buffer of a prefill instance to a decode instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from alignedserve.protocol.messages import Stage, Unstage, Work
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.instance_views import PrefillView
from alignedserve.router.link_health import LinkHealth
from alignedserve.router.offers import Offers
from alignedserve.router.outbox import Outbox
from alignedserve.router.recaller import Recaller
from alignedserve.router.request_state import Phase, RequestState
from alignedserve.router.request_table import RequestTable
from alignedserve.router.transitions import PhaseTransitions
from alignedserve.types import InstanceId, RequestKey


@dataclass(eq=False, slots=True)
class Staging:
    # See RouterConfig.
    _link: str
    _cluster: ClusterState
    _requests: RequestTable
    _transitions: PhaseTransitions
    _recaller: Recaller
    _outbox: Outbox
    _offers: Offers
    _link_health: LinkHealth

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
            self._link_health.staged(stager.instance_id, decode, state.key)
            self._transitions.stage(state, stager.instance_id, decode, is_batch, batch)
            stager.staging[state.key] = num_blocks
            if not self._link_health.may_stage(stager, decode):
                stagers.remove(stager)  # A link on trial takes only one request.
            self._offers.promise(decode, state, is_batch)
            works.setdefault(stager.instance_id, []).append(state.work())
            staged.add(state.key)
        for instance_id, each in works.items():
            self._outbox.send(instance_id, Stage(decode, each))
        return staged

    def _stagers_for(
        self, decode: InstanceId, states: Sequence[RequestState], is_urgent: bool
    ) -> list[PrefillView]:
        prefills = self._cluster.prefills if self._link != "host" else []
        stagers = [
            view
            for view in prefills
            if isinstance(view, PrefillView) and self._link_health.may_stage(view, decode)
        ]
        if not (is_urgent and stagers):
            return stagers
        emptiest = max(stagers, key=lambda view: view.num_free_staging_blocks)
        num_needed = sum(map(emptiest.blocks_to_stage, states))
        return [emptiest] if emptiest.has_room_at_once(num_needed) else []

    def staged(self, stager: InstanceId, keys: Sequence[RequestKey]) -> None:
        """Offers requests with staged KV to the decode instances that they are staged for. If the link has failed
        meanwhile, they are loaded from the pool."""
        groups: dict[tuple[InstanceId | None, bool, int, InstanceId | None], list[RequestState]] = {}
        for key in keys:
            if state := self._requests.find(key, stager, Phase.STAGED):
                decode = state.staged_for
                source = stager if decode and self._link_health.may_pull(stager, decode, key) else None
                group = (decode, state.is_in_batch, state.batch, source)
                groups.setdefault(group, []).append(state)
        for (decode, is_batch, batch, source), states in groups.items():
            view = self._cluster.decode(decode)
            if decode and view and not view.is_draining:
                self._offers.offer(decode, states, is_batch, batch, source)
                if source is None:
                    self.unstage(states)
            else:
                for state in states:
                    self._recaller.recall(state)

    def unstage(self, states: Sequence[RequestState]) -> None:
        """Frees the room of staged copies in the buffers, because decode instances no longer need them."""
        unstaged: dict[InstanceId, list[RequestKey]] = {}
        for state in states:
            if state.staged_at:
                unstaged.setdefault(state.staged_at, []).append(state.key)
                self._transitions.unstage(state)
        for stager, keys in unstaged.items():
            if view := self._cluster.prefill(stager):
                for key in keys:
                    view.discard(key)
                self._outbox.send(stager, Unstage(keys))


def _preference(state: RequestState, stager: PrefillView) -> tuple[bool, int]:
    """Prefers idle instances for real time: an instance that computes reports only after its iteration."""
    return state.is_rt and not stager.pending.total, stager.num_free_staging_blocks
