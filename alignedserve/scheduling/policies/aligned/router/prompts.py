"""How many best-effort prompts are computed ahead while real time comes and goes. Pure."""

from __future__ import annotations

import math

from alignedserve.scheduling.island import Island

# The number of requests that are ready, per slot of the decode instances. Where no best-effort prompt is computed,
# real time waits for none.
STOCK = 1.0


def share_for_best_effort(island: Island) -> float:
    """Of the prefill instances: the fewer, the more decode instances have to choose from, or will have."""
    views = island.cluster.decodes
    most = STOCK * sum(view.hello.limits.max_num_seqs for view in views)
    num_there = sum(len(view.be_running) + len(view.be_promised) for view in views)
    num_ready = island.num_be - len(island.pinned) - num_there
    num_prefills = len(island.cluster.prefills)
    return math.ceil(num_prefills * (1 - num_ready / most)) / num_prefills if num_ready < most else 0.0
