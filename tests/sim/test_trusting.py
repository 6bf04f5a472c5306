"""A simulation that checks no KV and no token takes the same course as one that checks all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Request
from alignedserve.sim.executor import SimEngine
from alignedserve.sim.island import SimIsland
from alignedserve.sim.model import make_request, prompt_of
from alignedserve.sim.transfers import SimTransfers
from alignedserve.sim.trusting import TrustingEngine, TrustingTransfers
from tests.scheduling.keeping_inputs import NAME as KEEPING_INPUTS
from tests.sim.islands import every_policy, limits, play, requests, small_island

COLOCATED: dict[str, Any] = {"num_prefill": 0, "num_decode": 0, "num_colocated": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "apart": {"decode": limits(num_blocks=34)},
    "pulled": {"decode": limits(num_blocks=34), "link": "nccl", "num_prefill": 2},
    "colocated": COLOCATED | {"decode": limits(num_blocks=34)},
}


def many() -> list[Request]:
    """Memory is for a few of them at a time, so that some have to go."""
    asked = requests(24, every_s=0.02, output_len=120)
    return [replace(each, tier="be") if each.key % 3 else each for each in asked]


def check_same(policy: str, asked: Sequence[Request], **options: Any) -> SimIsland:
    """Returns the island where nothing was checked."""
    checked, trusting = (
        play(small_island(policy, pool_blocks=400, is_checked=each, **options), asked)
        for each in (True, False)
    )
    assert {(type(each.engine), type(each.transfers)) for each in checked.instances} == {
        (SimEngine, SimTransfers)
    }
    assert {(type(each.engine), type(each.transfers)) for each in trusting.instances} == {
        (TrustingEngine, TrustingTransfers)
    }
    assert trusting.now == checked.now and trusting.world.clock.num_events == checked.world.clock.num_events
    assert trusting.world.computed == checked.world.computed
    for one, other in zip(trusting.streams, checked.streams, strict=True):
        assert (one.times_s, one.outcome, one.ended_s) == (other.times_s, other.outcome, other.ended_s)
        assert (one.tokens, one.num_reused) == (other.tokens, other.num_reused)
    return trusting


@every_policy
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_tokens_come_at_the_same_times(policy: str, layout: str) -> None:
    check_same(policy, many(), **LAYOUTS[layout])


@pytest.mark.parametrize("policy", [KEEPING_INPUTS, "apt", "apt-s"])
def test_so_they_do_where_inputs_are_kept(policy: str) -> None:
    check_same(policy, many(), **COLOCATED, decode=replace(limits(num_blocks=34), max_restored_blocks=34))


def test_so_they_do_where_blocks_are_shared_from_both_ends() -> None:
    check_same("bros", many(), **COLOCATED, decode=limits(num_blocks=34), scheduling={"share_blocks": True})


@pytest.mark.parametrize("num_full", [0, 1])
def test_so_they_do_where_blocks_of_a_window_are_held(num_full: int) -> None:
    decode = replace(limits(num_blocks=64), window=100, num_full_groups=num_full, tile_tokens=16)
    prefill = replace(limits(num_blocks=128), window=100, num_full_groups=num_full, tile_tokens=16)
    check_same("aligned", many(), prefill=prefill, decode=decode)


def test_so_they_do_where_prompts_share_a_prefix() -> None:
    """A hash id names 512 tokens, and these prompts have the first 300, or more, of one. What comes after the shorter
    ones are their answers, which no longer prompt begins with."""
    asked = [
        make_request(key, prompt_len, 150, arrival_s=key * 5.0, prompt=prompt_of(key, prompt_len, [7]))
        for key, prompt_len in enumerate((300, 480, 330, 450), 1)
    ]
    island = check_same("aligned", asked, **COLOCATED | {"num_colocated": 1}, enable_prefix_caching=True)
    assert [each.num_reused for each in island.streams] == [0, 288, 320, 448]
