"""First come, first served: a pooled request goes to the emptiest decode instance as soon as it fits there.

What DistServe does, and the baseline: nothing is staged ahead, lengths don't matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alignedserve.router.entry import Entry
from alignedserve.router.fleet import Fleet
from alignedserve.router.policies.base import Assign, BatchPolicy
from alignedserve.router.pooled import Pooled
from alignedserve.types import InstanceId


class FcfsPolicy(BatchPolicy):
    name = "fcfs"
    uses_index = False

    def in_order(self, pooled: Pooled) -> Iterable[Entry]:
        """Nobody is overtaken by one that comes later here."""
        return pooled

    def decide(self, fleet: Fleet, pooled: Pooled, now: float) -> Sequence[Assign]:
        decodes = fleet.decodes
        blocks = {view.instance_id: view.num_unspoken_blocks for view in decodes}
        slots = {view.instance_id: view.num_unspoken_slots for view in decodes}
        block_size = max((view.hello.limits.block_size for view in decodes), default=1)
        chosen: dict[InstanceId, list[Entry]] = {}
        for entry in self.in_order(pooled):
            open_ones = [name for name in blocks if slots[name] > 0]
            if not open_ones:
                break
            best = max(open_ones, key=lambda name: blocks[name])
            needed = -(-entry.num_tokens // block_size)
            if needed > blocks[best]:
                break
            blocks[best] -= needed
            slots[best] -= 1
            chosen.setdefault(best, []).append(entry)
        return [
            Assign(view.instance_id, chosen[view.instance_id], False)
            for view in decodes
            if view.instance_id in chosen
        ]
