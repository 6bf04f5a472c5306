"""How much of its resources an island uses. An observer of the router's messages."""

from __future__ import annotations

from alignedserve.protocol.messages import DecodeReport, PrefillReport
from alignedserve.router.events import Event, Received, Send, Tick
from alignedserve.sim.island import SimIsland


class LoadObserver:
    def __init__(self, island: SimIsland, begin_s: float) -> None:
        """Computing counts from `begin_s` on."""
        self._island = island
        self._begin_s = begin_s
        # For each role, the seconds that all of its instances together have computed.
        self.computing_s = {"prefill": 0.0, "decode": 0.0}
        self.most_pool_blocks = 0

    def __call__(self, now: float, event: Event, sends: list[Send]) -> None:
        if isinstance(event, Tick) and self._island.pool.is_up:
            self._look_at_pool()
        if now <= self._begin_s or not isinstance(event, Received):
            return
        if isinstance(event.message, PrefillReport):
            self.computing_s["prefill"] += event.message.duration_s
        elif isinstance(event.message, DecodeReport):
            self.computing_s["decode"] += event.message.duration_s

    def _look_at_pool(self) -> None:
        """Excludes spare copies, because they only fill otherwise unused blocks."""
        pool = self._island.pool.core
        num_used = pool.num_blocks - pool.num_free_blocks - pool.num_spare_blocks
        self.most_pool_blocks = max(self.most_pool_blocks, num_used)
