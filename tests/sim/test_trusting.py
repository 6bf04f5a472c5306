"""A simulation that looks at no KV and no token is the same one as that which looks at all of them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.sim.executor import SimEngine
from alignedserve.sim.island import Island
from alignedserve.sim.trusting import TrustingEngine
from tests.scheduling.keeping_inputs import NAME as KEEPING_INPUTS
from tests.sim.islands import every_policy, limits, play, requests, small_island

COLOCATED: dict[str, Any] = {"num_prefill": 0, "num_decode": 0, "num_colocated": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "apart": {"decode": limits(num_blocks=34)},
    "pulled": {"decode": limits(num_blocks=34), "link": "nccl", "num_prefill": 2},
    "colocated": COLOCATED | {"decode": limits(num_blocks=34)},
}


def played(policy: str, *, is_checked: bool, **options: Any) -> Island:
    """Memory for a few of them at a time, so that some have to go."""
    island = small_island(policy, pool_blocks=400, is_checked=is_checked, **options)
    asked = requests(24, every_s=0.02, output_len=120)
    return play(island, [replace(each, tier="be") if each.key % 3 else each for each in asked])


def check_same(policy: str, **options: Any) -> None:
    checked, trusting = (played(policy, is_checked=each, **options) for each in (True, False))
    assert {type(each.engine) for each in checked.instances} == {SimEngine}
    assert {type(each.engine) for each in trusting.instances} == {TrustingEngine}
    assert trusting.now == checked.now and trusting.world.clock.num_events == checked.world.clock.num_events
    assert trusting.world.computed == checked.world.computed
    for one, other in zip(trusting.streams, checked.streams, strict=True):
        assert (one.times_s, one.outcome, one.ended_s) == (other.times_s, other.outcome, other.ended_s)
        assert not any(one.tokens) and any(other.tokens)


@every_policy
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_tokens_come_at_the_same_times(policy: str, layout: str) -> None:
    check_same(policy, **LAYOUTS[layout])


@pytest.mark.parametrize("policy", [KEEPING_INPUTS, "apt"])
def test_so_they_do_where_inputs_are_kept(policy: str) -> None:
    check_same(policy, **COLOCATED, decode=replace(limits(num_blocks=34), max_restored_blocks=34))


def test_so_they_do_where_blocks_are_shared_from_both_ends() -> None:
    check_same("bros", **COLOCATED, decode=limits(num_blocks=34), scheduling={"share_blocks": True})


@pytest.mark.parametrize("num_full", [0, 1])
def test_so_they_do_where_blocks_of_a_window_are_held(num_full: int) -> None:
    decode = replace(limits(num_blocks=64), window=100, num_full_groups=num_full, tile_tokens=16)
    prefill = replace(limits(num_blocks=128), window=100, num_full_groups=num_full, tile_tokens=16)
    check_same("aligned", prefill=prefill, decode=decode)
