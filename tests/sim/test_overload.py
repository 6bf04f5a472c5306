"""Policies with instances that choose among prompts, with more requests than one holds, in virtual time."""

from __future__ import annotations

from dataclasses import replace as with_fields
from functools import cache
from random import Random
from statistics import fmean

import pytest
from msgspec.structs import replace

from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.report import Objectives, Report, latency_of
from alignedserve.sim.scenario import Scenario
from alignedserve.sim.trace import Arrival, Lengths, poisson_arrivals
from alignedserve.timing.cost_presets import load_cost_model

COST = replace(load_cost_model("opt-13b/a100-80gb"), num_kv_tokens=12_000)


def overload(rate: float = 5.0) -> list[Arrival]:
    """At 5 requests/s about one and a half times what the instance can do, over twenty times what it holds at once."""
    dice = Random(1)
    lengths = [Lengths(dice.choice([60, 200, 900]), dice.choice([60, 200, 600])) for _ in range(200)]
    return poisson_arrivals(lengths, rate, seed=1)


def scenario(policy: str, tpot_s: float = 1.0) -> Scenario:
    return Scenario(
        COST,
        num_colocated=1,
        max_model_len=2048,
        slo=Objectives(ttft_s=1.0, tpot_s=tpot_s),
        scheduling=SchedulingConfig(policy),
    )


@cache
def run(policy: str, tpot_s: float = 1.0) -> Report:
    return scenario(policy, tpot_s).run(overload())


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["apt", "apt-s", "bros"])
def test_those_that_can_be_in_time_pass_all_that_are_late(policy: str) -> None:
    """Late ones are overtaken wherever they wait, not only among the few that the router sends ahead."""
    fcfs, choosing = run("fcfs"), run(policy)
    assert choosing.attainment > 2 * fcfs.attainment
    assert choosing.tokens_per_s > 0.95 * fcfs.tokens_per_s


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
def test_objectives_that_no_prompt_fits_between_cost_bros_no_throughput() -> None:
    """A prompt of 900 tokens takes longer than a token may."""
    fcfs, bros = run("fcfs", tpot_s=0.1), run("bros", tpot_s=0.1)
    assert bros.attainment > 2 * fcfs.attainment
    assert bros.tokens_per_s > 0.9 * fcfs.tokens_per_s


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
def test_documents_longer_than_objectives_go_on_beside_real_time() -> None:
    """At a rate that fits, every third request being best effort."""
    arrivals = [
        with_fields(each, tier="rt" if number % 3 else "be") for number, each in enumerate(overload(1.5))
    ]
    taken_s = {
        policy: fmean(
            latency_of(stream).jct_s
            for stream in scenario(policy, tpot_s=0.1).simulate(arrivals).streams
            if stream.request.tier == "be"
        )
        for policy in ("priority", "bros")
    }
    assert taken_s["bros"] < 1.5 * taken_s["priority"]
