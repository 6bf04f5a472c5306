"""Small islands for tests: one of the longest requests fills half of an instance, so that memory is always short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from alignedserve.protocol.messages import InstanceLimits, Request
from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import POLICIES
from alignedserve.sim.island import IslandConfig, SimIsland
from alignedserve.sim.model import make_request
from alignedserve.timing.cost import Channels, CostModel
from alignedserve.timing.cost_presets import load_cost_model

COST = load_cost_model("opt-13b/a100-80gb")
BLOCK_SIZE = 16
# `aligned`, and this run's share of the others.
every_policy = pytest.mark.parametrize(
    "policy",
    [
        "aligned",
        *(pytest.param(each, marks=pytest.mark.drawn(one_in=4)) for each in POLICIES if each != "aligned"),
    ],
)


def limits(num_blocks: int = 64, max_num_seqs: int = 16, max_num_batched_tokens: int = 128) -> InstanceLimits:
    return InstanceLimits(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=512,
    )


def with_slow_copies(cost: CostModel, slowdown: float) -> CostModel:
    """So slow that a copy may last as long as an iteration, and much can happen meanwhile."""
    slower = {
        name: replace(channel, bytes_per_s=channel.bytes_per_s / slowdown)
        for name, channel in asdict(cost.channels).items()
    }
    return replace(cost, channels=Channels(**slower))


def small_island(
    policy: str = "aligned",
    link: str = "host",
    pool_blocks: int = 256,
    scheduling: dict[str, Any] | None = None,
    **options: Any,
) -> SimIsland:
    settings = {"prefill": limits(), "decode": limits(), "cost": COST} | options
    config = IslandConfig(
        pool_blocks=pool_blocks,
        router=RouterConfig(link=link),
        scheduling=SchedulingConfig(policy, min_batch_requests=4, **(scheduling or {})),
        **settings,
    )
    return SimIsland(config)


def requests(num: int, every_s: float = 0.05, prompt_len: int = 100, output_len: int = 40) -> list[Any]:
    """Of different lengths, around these."""
    return [
        make_request(
            key=index + 1,
            prompt_len=prompt_len // 2 + index * 37 % prompt_len,
            num_output_tokens=output_len // 2 + index * 17 % output_len,
            arrival_s=index * every_s,
            max_tokens=400,
        )
        for index in range(num)
    ]


def play(island: SimIsland, asked: Sequence[Request], *, limit_s: float = 1000.0) -> SimIsland:
    """These requests arrive, and all of them end as they should."""
    island.submit(asked)
    island.start()
    return finish(island, len(asked), limit_s=limit_s)


def finish(island: SimIsland, num_requests: int, *, limit_s: float = 1000.0) -> SimIsland:
    """This number of requests ends, with all of their tokens and before this time, and nothing is left."""
    assert island.run_until_done(num_requests, limit_s), (
        f"{island.num_open} requests are open at {island.now} s"
    )
    island.settle()
    island.check_idle()
    assert all(stream.is_complete for stream in island.streams)
    return island
