"""Offers requests to decode instances, which admit them when they have room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.protocol.messages import Offer
from alignedserve.router.clock import Clock
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.outbox import Outbox
from alignedserve.router.request_state import Phase, RequestState
from alignedserve.router.transitions import PhaseTransitions
from alignedserve.types import InstanceId


@dataclass(eq=False, slots=True)
class Offers:
    _clock: Clock
    _cluster: ClusterState
    _transitions: PhaseTransitions
    _outbox: Outbox

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
        stager, view = self._cluster.prefill(source), self._cluster.decode(decode)
        address = stager.hello.link if stager else ""
        replaces = bool(is_batch and view and view.is_batch_replacing)
        # A prefill instance has all of the KV, whatever the pool has by now.
        works = [state.work(state.num_tokens - 1 if source else None) for state in states]
        self._outbox.send(decode, Offer(works, is_batch, source, address, batch, replaces))

    def promise(self, decode: InstanceId, state: RequestState, is_batch: bool) -> None:
        """Counts the blocks that the request will need at the decode instance, including one more column."""
        if view := self._cluster.decode(decode):
            span = view.hello.limits.span
            num_blocks = view.blocks_of(state) or span.num_held(state.num_cached, state.num_tokens)
            num_blocks += span.num_groups
            view.add_offered(state.key, num_blocks, is_batch, state.is_rt, self._clock.now)
