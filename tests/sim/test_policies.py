"""`aligned` and `fcfs` on the same requests in virtual time: the policy's benefit, and what it may not cost."""

from __future__ import annotations

from dataclasses import replace as replace_arrival
from random import Random
from statistics import fmean

import pytest
from msgspec.structs import replace

from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.host_links import Sharing
from alignedserve.sim.report import Report
from alignedserve.sim.scenario import Scenario
from alignedserve.sim.trace import Arrival, Lengths, poisson_arrivals
from alignedserve.timing.cost import Attention
from alignedserve.timing.cost_presets import load_cost_model

# with less memory, so that a short test fills it
COST = replace(load_cost_model("opt-13b/a100-80gb"), num_kv_tokens=20_000)


def mixed(num_requests: int, rate: float, seed: int = 1) -> list[Arrival]:
    """Three short prompts for a long one."""
    dice = Random(seed)
    lengths = [
        Lengths(dice.choice([300, 310, 320, 3000]), dice.randint(20, 120)) for _ in range(num_requests)
    ]
    return poisson_arrivals(lengths, rate, seed)


def run(policy: str, attention: Attention, workload: list[Arrival]) -> Report:
    scenario = Scenario(
        COST.with_attention(attention),
        RouterConfig(link="nccl"),
        num_prefill=4,
        pool_bytes=800e9,
        scheduling=SchedulingConfig(policy),
        # Which copies meet moves whole batches of runs as short as these, by more than what is compared.
        sharing=Sharing(is_on=False),
    )
    return scenario.run(workload)


@pytest.mark.slow
def test_where_the_longest_holds_up_the_others_alike_ones_decode_faster() -> None:
    """In the mean of two runs: which requests meet in the pool differs much between them. They are best effort. If not
    all real time can be in time, it goes by what can be, and not by length."""
    paces, spreads = [], []
    for seed in (1, 2):
        workload = [replace_arrival(each, tier="be") for each in mixed(600, 100.0, seed)]
        fcfs, aligned = (run(policy, "padded", workload) for policy in ("fcfs", "aligned"))
        paces.append(aligned.decode_tokens_per_busy_s / fcfs.decode_tokens_per_busy_s)
        spreads.append(aligned.max_over_mean_length / fcfs.max_over_mean_length)
    assert fmean(paces) > 1.2
    assert fmean(spreads) < 0.85


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
def test_where_lengths_cost_nothing_alike_ones_decode_no_slower() -> None:
    workload = mixed(300, rate=100.0)
    fcfs, aligned = (run(policy, "balanced", workload) for policy in ("fcfs", "aligned"))
    assert aligned.decode_tokens_per_busy_s > 0.99 * fcfs.decode_tokens_per_busy_s


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
def test_best_effort_alone_runs_one_batch_at_a_time() -> None:
    """AlignedServe's paper: at most 12.4 % of iterations have requests of several batches."""
    workload = [replace_arrival(each, tier="be") for each in mixed(300, rate=100.0)]
    reports = {policy: run(policy, "padded", workload) for policy in ("fcfs", "aligned")}
    assert reports["aligned"].mixed < 0.124
    assert reports["aligned"].max_over_mean_length < 0.85 * reports["fcfs"].max_over_mean_length
    assert reports["aligned"].decode_tokens_per_busy_s > 1.05 * reports["fcfs"].decode_tokens_per_busy_s


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
def test_best_effort_alone_is_batched_only_where_that_pays() -> None:
    """Where lengths cost nothing, it is admitted in order of arrival. A batch with a common prefix reads it once."""
    alone = [replace_arrival(each, tier="be") for each in mixed(300, rate=100.0)]
    fcfs, aligned = (run(policy, "balanced", alone) for policy in ("fcfs", "aligned"))
    assert aligned.max_over_mean_length > 0.95 * fcfs.max_over_mean_length
    assert aligned.decode_tokens_per_busy_s > 0.99 * fcfs.decode_tokens_per_busy_s
    # Two jobs of 1,024 and 4,096 common tokens, and some more of each line.
    jobs = {0: (1, 2), 1: tuple(range(10, 18))}
    common = [
        replace_arrival(
            each,
            lengths=Lengths(512 * len(jobs[key % 2]) + 100, each.lengths.output),
            hash_ids=(*jobs[key % 2], 100 + key),
        )
        for key, each in enumerate(alone)
    ]
    fcfs, aligned = (run(policy, "balanced", common) for policy in ("fcfs", "aligned"))
    assert aligned.max_over_mean_length < 0.85 * fcfs.max_over_mean_length


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
def test_with_room_for_everybody_nobody_waits_for_a_batch() -> None:
    workload = mixed(100, rate=4.0)
    fcfs, aligned = (run(policy, "balanced", workload) for policy in ("fcfs", "aligned"))
    # a search in the pool is two messages: some join an iteration later, of twenty and more
    assert aligned.tpot_s.mean < fcfs.tpot_s.mean + 0.001
    assert aligned.tpot_s.p99 < fcfs.tpot_s.p99 + 0.003
