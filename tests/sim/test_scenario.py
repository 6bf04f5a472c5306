"""What a scenario makes of an arrival."""

from __future__ import annotations

from math import inf

from alignedserve.kv.groups import STATE_WINDOW, one_group
from alignedserve.sim.report import Objectives
from alignedserve.sim.scenario import Scenario
from alignedserve.sim.trace import Arrival, Lengths
from tests.sim.islands import COST


def test_an_arrival_s_own_objectives_go_before_those_of_all() -> None:
    scenario = Scenario(COST, slo=Objectives(1.0, 0.1))
    own = scenario.request(1, Arrival(0.0, Lengths(10, 5), ttft_s=3.0, tbt_s=0.2))
    assert (own.ttft_s, own.tbt_s) == (3.0, 0.2)
    common = scenario.request(2, Arrival(0.0, Lengths(10, 5)))
    assert (common.ttft_s, common.tbt_s) == (1.0, 0.1)
    never = scenario.request(3, Arrival(0.0, Lengths(10, 5), ttft_s=inf, tbt_s=inf))
    assert (never.ttft_s, never.tbt_s) == (None, None)
    best_effort = scenario.request(4, Arrival(0.0, Lengths(10, 5), "be", ttft_s=3.0))
    assert best_effort.ttft_s is None


def test_all_of_an_island_pass_states_in_the_same_steps() -> None:
    island = Scenario(COST, groups=one_group(1, STATE_WINDOW, has_state=True)).island()
    limits = [island.pool._limits, island.config.prefill, island.config.decode]
    assert {(each.window, each.tile_tokens, each.has_state) for each in limits} == {(STATE_WINDOW, 1, True)}
