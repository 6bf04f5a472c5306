"""An island with a model that has sliding layers and layers that attend to all tokens."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from alignedserve.sim.island import SimIsland
from alignedserve.sim.lifetime import Lifetimes
from alignedserve.sim.model import make_request
from tests.sim.islands import finish, limits, small_island

NUM_REQUESTS = 12
# Each run has one part of the evictions.
NUM_PARTS = 4
# One group attends to all tokens, and two to the latest hundred.
GROUPS = {"window": 100, "num_full_groups": 1, "num_sliding_groups": 2}


def island_with_batches() -> SimIsland:
    """Of best effort, whose tokens the router keeps back for a moment."""
    island = small_island(prefill=replace(limits(192), **GROUPS), decode=replace(limits(102), **GROUPS))
    requests = [
        make_request(1 + index, 60 + index * 37 % 120, 200, 0.0, max_tokens=400, tier="be", deadline_s=1e6)
        for index in range(NUM_REQUESTS)
    ]
    island.submit(requests)
    island.start()
    return island


@pytest.mark.slow
@pytest.mark.drawn(one_in=NUM_PARTS)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_router_that_dies_as_it_evicts_costs_no_token(part: int) -> None:
    """The next one hears of fewer tokens than the pool has KV of, and of those of its window some may not be there."""
    undisturbed, lifetimes = island_with_batches(), Lifetimes()
    undisturbed.router.observers.append(lifetimes)
    assert undisturbed.run_until_done(NUM_REQUESTS, 300.0)
    evicted_s = lifetimes.times("evicted")
    assert len(evicted_s) > 10
    for when_s in evicted_s[part::NUM_PARTS]:
        island = island_with_batches()
        island.world.clock.at(when_s + 0.0005, island.router.kill)
        island.world.clock.at(when_s + 0.5, island.router.start)
        finish(island, NUM_REQUESTS, limit_s=300.0)
