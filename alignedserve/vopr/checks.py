"""Invariants, checked at the router's steps by observers that know the messages, and nothing of the deciding parts.

Other checks are elsewhere. Gateways check that a request's tokens are right and that it ends once. Engine and segment
check that KV is right.
"""

from __future__ import annotations

from collections import Counter

from alignedserve.protocol.messages import Abort, Offer, PrefillReport, Reserve, Submit, Tokens
from alignedserve.router.events import Closed, Event, Received, Send, Tick
from alignedserve.sim.island import SimIsland
from alignedserve.types import PoolBlockId, RequestKey
from alignedserve.vopr.failures import Broken
from alignedserve.vopr.plan import Plan


class CountsAddUp:
    """Checks at every tick of the router that requests share no block of the pool but those of common beginnings, that
    none is lost, and that counts match. Checks too that the router's records of each request go with the request's
    phase, and that it is the turn of the least served owner."""

    def __init__(self, island: SimIsland) -> None:
        self._island = island

    def __call__(self, now: float, event: Event, sends: list[Send]) -> None:
        if isinstance(event, Tick):
            self.check()

    def check(self) -> None:
        self._island.check()
        self._check_owners()
        if core := self._island.router.core:
            core.state.prefill_queue.check_turns()
            core.state.decode_queue.check_turns()
            for state in core.state.requests:
                state.check()

    def _check_owners(self) -> None:
        pool = self._island.pool
        if not pool.is_up:
            return
        # The block before each block, and a request that lists both.
        before: dict[PoolBlockId, tuple[PoolBlockId | None, RequestKey]] = {}
        for stored in pool.core.allocations:
            for block, previous in zip(stored.blocks, [None, *stored.blocks], strict=False):
                other, key = before.setdefault(block, (previous, stored.key))
                if other != previous:
                    raise Broken(
                        f"pool block {block} of request {stored.key} follows {previous}, "
                        f"and {other} as a block of {key}"
                    )
        use = pool.core.use
        if len(before) + use.num_kept_blocks + use.num_free_blocks != pool.core.num_blocks:
            raise Broken(
                f"{len(before)} blocks of the pool are listed, {use.num_kept_blocks} kept and "
                f"{use.num_free_blocks} free, of {pool.core.num_blocks}"
            )


class PhasesSeen:
    """Counts how many requests were in each phase, and how many were handed over directly."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, now: float, event: Event, sends: list[Send]) -> None:
        held = set[RequestKey]()
        if isinstance(event, Received) and isinstance(event.message, PrefillReport):
            held = {*event.message.held}
        for send in sends:
            if isinstance(send.message, Tokens):
                for timeline in send.message.timelines.values():
                    self.counts.update({phase for phase, _ in timeline})
            elif isinstance(send.message, Offer):
                self.counts["handed over"] += sum(work.request.key in held for work in send.message.works)


class RealTimeFirst:
    """Checks the promise of `priority`: the router requests a best-effort prompt's first blocks only after those of
    every real-time prompt that it has.

    The other policies promise shares, or nothing. Prompts of colocated instances start without pool blocks, and those
    of embeddings take none.
    """

    @staticmethod
    def is_promised(plan: Plan) -> bool:
        return plan.policy == "priority" and not plan.num_colocated

    def __init__(self, island: SimIsland) -> None:
        self._island = island
        self._core: object = None
        self._is_rt: dict[RequestKey, bool] = {}
        # Requests for which no block was requested yet.
        self._waiting: set[RequestKey] = set()

    def __call__(self, now: float, event: Event, sends: list[Send]) -> None:
        if self._core is not self._island.router.core:
            self._core, self._is_rt, self._waiting = self._island.router.core, {}, set()
        match event:
            case Received(message=Submit(request=request, delivered=delivered)):
                if request.key not in self._is_rt and not delivered and request.pooling is None:
                    self._is_rt[request.key] = request.tier == "rt"
                    self._waiting.add(request.key)
            case Received(message=Abort(keys=keys)):
                self._waiting.difference_update(keys)
            case Closed():
                # The requests of a gateway that is gone end with it, and the others may be anywhere.
                self._waiting.clear()
            case _:
                pass
        for send in sends:
            self._sent(send)

    def _sent(self, send: Send) -> None:
        if not isinstance(send.message, Reserve):
            return
        key = send.message.key
        is_first = key in self._waiting
        self._waiting.discard(key)
        if is_first and not self._is_rt[key]:
            passed = [other for other in self._waiting if self._is_rt[other]]
            if passed:
                raise Broken(f"best-effort request {key} is begun before {passed[0]}, which is real time")
