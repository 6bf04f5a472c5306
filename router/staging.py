"""With a link, KV goes from the pool through the staging buffer of a prefill instance to a decode instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.protocol.messages import Stage, Unstage
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.instance_views import PrefillView
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

    def stage(
        self, decode: InstanceId, states: Sequence[RequestState], is_batch: bool, is_urgent: bool
    ) -> set[RequestKey]:
        """Stages the requests that the emptiest buffer has room for, in order, and returns their keys. Urgent requests
        are not staged where they would wait for others, or where prompts have taken the room."""
        stager = self._emptiest()
        num_needed = sum(len(state.blocks) for state in states)
        if stager is None or (is_urgent and not stager.has_room_at_once(num_needed)):
            return set()
        works, num_free = [], stager.num_free_staging_blocks
        for state in states:
            num_blocks = -(-state.num_cached // stager.hello.limits.block_size)
            if num_blocks > num_free:
                continue
            num_free -= num_blocks
            self._begin(state, stager, num_blocks, decode, is_batch)
            works.append(state.work())
        if works:
            self._outbox.send(stager.instance_id, Stage(decode, works))
        return {work.request.key for work in works}

    def _emptiest(self) -> PrefillView | None:
        prefills = self._cluster.prefills if self._link != "host" else []
        stagers = [view for view in prefills if isinstance(view, PrefillView)]
        return max(stagers, key=lambda view: view.num_free_staging_blocks, default=None)

    def _begin(
        self, state: RequestState, stager: PrefillView, num_blocks: int, decode: InstanceId, is_batch: bool
    ) -> None:
        self._transitions.stage(state, stager.instance_id, decode, is_batch)
        stager.staging[state.key] = num_blocks
        self._offers.promise(decode, state, is_batch)

    def staged(self, stager: InstanceId, keys: Sequence[RequestKey]) -> None:
        """The requests' KV is in a prefill instance's buffer: they are offered to the decode instances which they are
        staged for."""
        groups: dict[tuple[InstanceId | None, bool], list[RequestState]] = {}
        for key in keys:
            if state := self._requests.find(key, stager, Phase.STAGED):
                groups.setdefault((state.staged_for, state.is_in_batch), []).append(state)
        for (decode, is_batch), states in groups.items():
            if decode and self._cluster.decode(decode):
                self._offers.offer(decode, states, is_batch, source=stager)
            else:
                for state in states:
                    self._recaller.recall(state)

    def unstage(self, states: Sequence[RequestState]) -> None:
        """Decode instances have the KV of those requests that were staged: their room in the buffers is free again."""
        unstaged: dict[InstanceId, list[RequestKey]] = {}
        for state in states:
            if state.staged_at:
                unstaged.setdefault(state.staged_at, []).append(state.key)
                self._transitions.unstage(state)
        for stager, keys in unstaged.items():
            if view := self._cluster.prefill(stager):
                for key in keys:
                    view.staging.pop(key, None)
                self._outbox.send(stager, Unstage(keys))
