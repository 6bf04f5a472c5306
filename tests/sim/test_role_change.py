"""Islands with instances that change between prefill and decode: requests end normally, and nothing is left."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.island import IslandConfig, SimIsland
from alignedserve.sim.model import make_request
from tests.sim.islands import COST, limits
from tests.sim.test_classes import lifetimes_of

NUM_PROMPTS, NUM_STORIES = 150, 60


def island(link: str, policy: str) -> SimIsland:
    config = IslandConfig(
        cost=COST,
        prefill=limits(),
        decode=limits(),
        pool_blocks=400,
        num_prefill=2,
        num_decode=2,
        router=RouterConfig(link=link, change_roles=True),
        scheduling=SchedulingConfig(policy, min_batch_requests=4),
    )
    return SimIsland(config)


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("policy", ["aligned", "fcfs", "bros"])
@pytest.mark.parametrize("link", ["host", "ipc"])
def test_prompts_and_then_stories_change_roles_and_back(link: str, policy: str) -> None:
    """First much is to be computed and little decoded, then the other way round, then again."""
    prompts = [
        make_request(number + 1, 300 + number % 90, 2, 0.01 * number, ttft_s=0.5, tbt_s=0.1)
        for number in range(NUM_PROMPTS)
    ]
    stories = [
        make_request(
            1000 + number, 20 + number % 30, 200, 60.0 + 0.2 * number, max_tokens=300, ttft_s=0.5, tbt_s=0.1
        )
        for number in range(NUM_STORIES)
    ]
    again = [
        replace(each, key=type(each.key)(each.key + 5000), arrival_s=each.arrival_s + 150.0)
        for each in prompts
    ]
    changing = island(link, policy)
    lifetimes_of(changing, prompts + stories + again)
    assert changing.router.core
    changes = changing.router.core.state.counters.role_changes
    assert changes["prefill"] >= 1 and changes["decode"] >= 1, changes
