"""An int8 pool in simulation: more blocks, and fewer bytes to and from it; transfers between instances don't change."""

from __future__ import annotations

import pytest

from alignedserve.protocol.messages import Moved
from alignedserve.router.config import RouterConfig
from alignedserve.router.events import Event, Received, Send
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.model_kv import with_kv
from alignedserve.sim.scenario import Scenario
from alignedserve.sim.trace import Arrival, Lengths
from alignedserve.timing.cost import CostModel
from alignedserve.timing.cost_presets import cost_presets
from tests.sim.indirect import INDIRECT

COST = cost_presets()["opt-13b/a100-80gb"]
INT8 = with_kv(COST, block_size=16, pool_kv_dtype="int8")
# Of 16 slots of two bytes: 16 codes, and two bounds of two bytes.
SHARE = 20 / 32
TRAFFIC = [Arrival(number / 10, Lengths(300 + number, 40)) for number in range(20)]


def test_a_token_has_five_eighths_of_the_bytes_in_blocks_of_16() -> None:
    assert with_kv(COST, 16) is COST
    assert INT8.pool_bytes_per_token == SHARE * COST.kv_bytes_per_token
    assert with_kv(COST, 64, pool_kv_dtype="int8").pool_bytes_per_token == 68 / 128 * COST.kv_bytes_per_token


def test_the_same_memory_holds_more_blocks() -> None:
    assert num_pool_blocks(COST) == int(10e9 / (16 * 819_200))
    assert num_pool_blocks(INT8) == int(10e9 / (16 * 819_200 * SHARE))


def num_pool_blocks(cost: CostModel) -> int:
    island = Scenario(cost, pool_bytes=10e9).island()
    island.start()
    return island.pool.core.num_blocks


@pytest.mark.parametrize("link", ["host", "nccl"])
def test_copies_from_and_to_the_pool_have_fewer_bytes(link: str) -> None:
    plain, stored = moved(COST, link), moved(INT8, link)
    assert plain["save"] and plain["load"] and bool(plain["pull"]) == (link == "nccl")
    assert stored == {what: num_bytes * (1 if what == "pull" else SHARE) for what, num_bytes in plain.items()}


def moved(cost: CostModel, link: str) -> dict[str, float]:
    """The bytes of each kind of copy."""
    scenario = Scenario(cost, RouterConfig(link=link), scheduling=SchedulingConfig(INDIRECT))
    island, found = scenario.island(), {"save": 0.0, "load": 0.0, "pull": 0.0}

    def hear(now: float, event: Event, sends: list[Send]) -> None:
        reported: list[Moved] = getattr(event.message, "moved", []) if isinstance(event, Received) else []
        for each in reported:
            found[each.what] += each.num_bytes

    island.router.observers.append(hear)
    requests = scenario.requests(TRAFFIC)
    island.submit(requests)
    island.start()
    assert island.run_until_done(len(requests), 600.0)
    return found
