"""Static priority: `fcfs`, but real time goes before best effort.

What serving systems with a priority field do, and a baseline: whoever is running stays, however urgent the others are.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from alignedserve.router.entry import Entry
from alignedserve.router.policies.fcfs import FcfsPolicy
from alignedserve.router.pooled import Pooled


class PriorityPolicy(FcfsPolicy):
    name = "priority"

    def in_order(self, pooled: Pooled) -> Iterable[Entry]:
        return chain(pooled.real_time, (entry for entry in pooled if not entry.is_rt))
