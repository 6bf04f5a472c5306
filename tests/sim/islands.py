"""Small islands for tests: one of the longest requests fills half of an instance, so that memory is always short."""

from __future__ import annotations

from typing import Any

from alignedserve.cost_presets import load_cost_model
from alignedserve.messages import InstanceLimits
from alignedserve.sim.island import Island, IslandConfig
from alignedserve.sim.model import make_request
from alignedserve.sim.segment import SimSegment
from alignedserve.types import RequestKey
from router.config import RouterConfig
from tests.sim.plain_pool import Holding, PlainPool

COST = load_cost_model("opt-13b/a100-80gb")
BLOCK_SIZE = 16


def limits(num_blocks: int = 64, max_num_seqs: int = 16, max_num_batched_tokens: int = 128) -> InstanceLimits:
    return InstanceLimits(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=512,
    )


class PlainPools:
    """Makes the pool's core; what the segment holds outlives it."""

    def __init__(self) -> None:
        self._holdings: dict[str, dict[RequestKey, Holding]] = {}
        self.cores: list[PlainPool] = []

    def __call__(self, segment: SimSegment) -> PlainPool:
        core = PlainPool(segment, self._holdings.get(segment.name, {}))
        self._holdings[segment.name] = core.holdings
        self.cores.append(core)
        return core


def small_island(
    policy: str = "aligned", link: str = "host", pool_blocks: int = 256, **options: Any
) -> Island:
    settings = {"prefill": limits(), "decode": limits()} | options
    config = IslandConfig(
        cost=COST,
        pool_blocks=pool_blocks,
        router=RouterConfig(policy=policy, link=link, min_batch_requests=4),
        **settings,
    )
    return Island(config, PlainPools())


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
