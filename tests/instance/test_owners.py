"""How long iterations are where several owners are expected."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from alignedserve.instance.owners import IterationLength
from alignedserve.protocol.messages import InstanceLimits
from alignedserve.timing.cost_presets import cost_presets
from alignedserve.timing.estimate import Estimate
from tests.sim.islands import COST

LIMITS = InstanceLimits(
    num_blocks=4096, block_size=16, max_num_seqs=64, max_model_len=32768, max_num_batched_tokens=2048
)
BOTH = Counter({"a": 4000, "b": 4000})


def most_tokens(estimate: Estimate | None, furthest: int = 0, missing: Counter[str] = BOTH) -> int:
    length = IterationLength(LIMITS, estimate)
    assert length.most_tokens(Counter({"a": 4000}), 0, 0.0) == LIMITS.max_num_batched_tokens
    found = length.most_tokens(missing, furthest, 1.0)
    if found == length.most_tokens(BOTH, furthest, 1.0):
        assert length.most_tokens(Counter({"a": 4000}), furthest, 2.0) == found, "the other one is expected"
    return found


@pytest.mark.parametrize("furthest", [0, 30000])
@pytest.mark.parametrize("name", cost_presets())
def test_they_cost_little_of_the_pace_and_no_more_than_that_needs(name: str, furthest: int) -> None:
    estimate = Estimate(cost_presets()[name])
    count = most_tokens(estimate, furthest)

    def share(num_tokens: int) -> float:
        """Of the pace of the longest."""
        whole_s = estimate.chunk(furthest, LIMITS.max_num_batched_tokens)
        pace = num_tokens / estimate.chunk(furthest, num_tokens)
        return pace * whole_s / LIMITS.max_num_batched_tokens

    assert share(count) >= 0.8
    assert count == LIMITS.block_size or share(count - LIMITS.block_size) < 0.8


def test_what_requests_take_outside_the_engine_does_not_make_them_ever_longer() -> None:
    cost = replace(COST, prefill_fixed_s=0.001, prefill_token_s=0.001)
    estimate = Estimate(cost)
    short = most_tokens(estimate)
    for _ in range(100):
        took_s = estimate.iteration([(0, 64)], [])
        estimate.took(took_s, took_s + 1.0, 1.0)
    assert estimate.outside_s > 0.1
    assert most_tokens(estimate) <= 2 * short + LIMITS.block_size


def test_an_owner_with_little_waits_for_half_as_long() -> None:
    estimate = Estimate(COST)
    short = most_tokens(estimate)
    assert most_tokens(estimate, missing=Counter(a=4000, b=10)) == short // 2 // 16 * 16


def test_without_a_cost_model_they_are_as_long_as_always() -> None:
    assert most_tokens(None) == LIMITS.max_num_batched_tokens
