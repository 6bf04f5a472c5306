"""Fitting, compared with cases worked out by hand and with simulations."""

from __future__ import annotations

import dataclasses
from math import inf

import pytest
from msgspec.structs import replace

from alignedserve.cli.simulate.config import SimConfig
from alignedserve.cli.simulate.traffic import make_traffic
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.report import Objectives
from alignedserve.sim.scenario import Scenario
from alignedserve.sim.trace import Lengths
from alignedserve.timing.cost import Channels, CopyChannel, CostModel, ExpertCounts, LinearCost
from alignedserve.timing.cost_presets import load_cost_model
from benchmarks.arena.fitting import Fitting, Layout, batch_of

CHANNEL = CopyChannel(0.0, 1e12)
# A second for each iteration with prompts, half a second without; 10 ms for a token of a prompt, and 1 ms for each
# token that is attended to. Memory holds ten requests of 105.5 tokens and half a block each.
COST = CostModel(
    source="made up",
    kv_bytes_per_token=1,
    num_kv_tokens=1144,
    prefill_fixed_s=1.0,
    prefill_token_s=0.01,
    prefill_attention_s=0.0,
    decode_lines=[LinearCost(0.5, 0.0)],
    decode_attention_s=0.001,
    num_filling=1,
    channels=Channels(save=CHANNEL, stage=CHANNEL, admit=CHANNEL, fetch=CHANNEL),
)
# Ten iterations decode each answer: its first token comes with the prompt. Lengths there are 101 to 110.
ALIKE = [Lengths(100, 11)] * 6
# Of an iteration with 2,048 tokens of prompts, 100 tokens have 100/2048 of its fixed second. Each prompt is attended to
# once.
ALONE_S = 100 * (1.0 / 2048 + 0.01) + 0.1
# Beside ten decodes: half of that second is the decodes', and 2,038 tokens are left.
BESIDE_S = 100 * (0.5 / 2038 + 0.01) + 0.1
# Ten iterations of ten requests of 105.5 tokens, a tenth of each.
DECODE_S = 0.5 + 0.001 * 10 * 105.5


@pytest.mark.parametrize(
    ("layout", "rate"),
    [
        ((0, 0, 1), 1 / (BESIDE_S + DECODE_S)),
        ((0, 0, 4), 4 / (BESIDE_S + DECODE_S)),
        # What decodes is full.
        ((1, 1, 0), 1 / DECODE_S),
        ((3, 1, 0), 1 / DECODE_S),
        # What computes prompts is.
        ((1, 3, 0), 1 / ALONE_S),
        ((2, 4, 0), 2 / ALONE_S),
    ],
)
def test_the_rate_of_each_layout(layout: tuple[int, int, int], rate: float) -> None:
    assert Fitting(COST, Layout(*layout), ALIKE).rate == pytest.approx(rate)


def test_short_prompts_share_the_fixed_costs_of_an_iteration() -> None:
    found = Fitting(COST, Layout(1, 1, 0), [Lengths(10, 11)])
    assert found.prompt_s == pytest.approx(10 * (1.0 / 2048 + 0.01) + 0.01)
    # One that is computed alone has them all.
    assert found.first_s == pytest.approx(1.11)


def test_a_long_prompt_reads_what_is_before_each_of_its_chunks() -> None:
    found = Fitting(COST, Layout(1, 1, 0), [Lengths(5000, 2)])
    assert found.prompt_s == pytest.approx(5000 * (1.0 / 2048 + 0.01) + 0.001 * (2048 + 4096 + 5000))


def test_experts_that_are_read_anyway_cost_a_prompt_nothing_beside_decodes() -> None:
    """Of two experts each token goes through one: with 2,048 tokens both are read, with one decode half of them."""
    cost = replace(COST, num_kv_tokens=115, expert_counts=ExpertCounts(2, 1), experts_s=8.0)
    apart, beside = (Fitting(cost, Layout(*layout), ALIKE) for layout in ((1, 1, 0), (0, 0, 1)))
    assert len(beside.batch) == 1
    assert apart.prompt_s == pytest.approx(100 * ((1.0 + 8.0) / 2048 + 0.01) + 0.1)
    assert beside.prompt_s == pytest.approx(100 * ((0.5 + 4.0) / 2047 + 0.01) + 0.1)


@pytest.mark.parametrize(
    ("lengths", "num_kv_tokens", "colocated", "apart"),
    [
        # What memory holds on average: half a block beside the tokens.
        (Lengths(100, 11), 1144, 10, 10),
        (Lengths(100, 11), 1134, 9, 9),
        (Lengths(100, 11), 50, 1, 1),
        # The largest batch that an instance has.
        (Lengths(10, 101), 1_000_000, 256, 256),
        # With 1,000 tokens of a prompt for ten decodes, 20 decodes are beside 2,000 tokens.
        (Lengths(1000, 11), 1_000_000, 20, 256),
        (Lengths(4000, 2), 1_000_000, 1, 249),
        # Nothing decodes.
        (Lengths(100, 1), 1144, 0, 0),
    ],
)
def test_the_batch_is_as_large_as_memory_and_prompts_allow(
    lengths: Lengths, num_kv_tokens: int, colocated: int, apart: int
) -> None:
    cost = replace(COST, num_kv_tokens=num_kv_tokens)
    for layout, size in (((0, 0, 1), colocated), ((1, 1, 0), apart)):
        assert len(Fitting(cost, Layout(*layout), [lengths]).batch) == size


@pytest.mark.parametrize("layout", [(0, 0, 2), (2, 1, 0)])
def test_where_answers_have_one_token_only_prompts_take_time(layout: tuple[int, int, int]) -> None:
    found = Fitting(COST, Layout(*layout), [Lengths(100, 1)])
    assert found.rate == pytest.approx(2 / ALONE_S)
    assert found.answer_s == found.first_s == pytest.approx(2.1)


# Half of those that decode have about 105 tokens and half about 1,005: ten of them have 5,555.
UNLIKE = [Lengths(100, 11), Lengths(1000, 11)]


@pytest.mark.parametrize(
    ("kernel", "num_filling", "num_read"),
    [
        ("balanced", 1, 5555),
        # All take as long as the longest, which stands for a tenth of all lengths: 1,009 tokens.
        ("padded", 1, 10 * 1009),
        # So they do where ten programs share the device and one alone can draw a tenth of what it reads.
        ("plain", 10, 10 * 1009),
        ("plain", 1, 5555),
    ],
)
def test_what_a_batch_costs_is_what_a_mix_of_lengths_costs(
    kernel: str, num_filling: float, num_read: int
) -> None:
    cost = replace(COST, num_kv_tokens=6000, num_filling=num_filling).with_attention(kernel)  # type: ignore[arg-type]
    found = Fitting(cost, Layout(1, 9, 0), UNLIKE)
    assert len(found.batch) == 10
    assert found.full_s == pytest.approx(0.5 + 0.001 * num_read, rel=1e-3)
    assert found.decode_s == pytest.approx(found.full_s, rel=1e-3)


def test_a_long_answer_is_met_more_often_in_a_batch() -> None:
    """The answer to the first has 100 decodes, to the second one."""
    batch = batch_of([Lengths(100, 101), Lengths(1000, 2)], 101)
    assert batch[-1] == 1001 and all(101 <= each <= 200 for each in batch[:-1])


@pytest.mark.parametrize("num_requests", [1, 2, 7, 50, 256])
def test_a_batch_is_of_the_mean_length(num_requests: int) -> None:
    lengths = [Lengths(97 * k % 3001 + 1, 13 * k % 301 + 1) for k in range(240)]
    num_decodes = sum(each.output - 1 for each in lengths)
    mean = sum((each.output - 1) * (each.prompt + each.output / 2) for each in lengths) / num_decodes
    batch = batch_of(lengths, num_requests)
    assert len(batch) == num_requests and batch == sorted(batch)
    assert sum(batch) / num_requests == pytest.approx(mean, abs=0.5)


def test_what_a_lone_request_and_a_whole_batch_take() -> None:
    found = Fitting(COST, Layout(1, 1, 0), ALIKE)
    assert found.first_s == pytest.approx(1.0 + 100 * 0.01 + 0.1)
    assert found.full_s == pytest.approx(1.555)
    # Among other prompts it is in an iteration of 2,048 tokens.
    assert found.first_among_others_s == pytest.approx(1.0 + 20.48 + 2.048)
    # 105.5 tokens, to the nearest even number.
    assert found.alone_s == pytest.approx(0.5 + 0.001 * 106)
    assert found.answer_s == pytest.approx(found.first_s + 10 * found.full_s)
    beside = Fitting(COST, Layout(0, 0, 1), ALIKE)
    assert beside.first_among_others_s == pytest.approx(1.0 + 20.38 + 2.038 + 1.055)
    long = Fitting(COST, Layout(1, 1, 0), [Lengths(3000, 11)])
    assert long.first_among_others_s == pytest.approx(2 * (1.0 + 20.48) + 2.048 + 4.096)


@pytest.mark.parametrize(
    ("machine", "layout", "lengths"),
    [("opt-13b/a100-80gb", (0, 0, 1), (1500, 100)), ("mixtral-8x7b/h200", (1, 1, 0), (1000, 40))],
)
def test_instances_that_always_have_work_do_about_as_much(
    machine: str, layout: tuple[int, int, int], lengths: tuple[int, int]
) -> None:
    """In simulation, in order of arrival, between a fifth and seven tenths of all tokens: batches fill before, and
    become smaller after."""
    num_prefill, num_decode, num_colocated = layout
    config = SimConfig(num_prompts=200, input_len=lengths[0], output_len=lengths[1], spread=1.5)
    cost = load_cost_model(machine)
    fitting = Fitting(cost, Layout(*layout), [each.lengths for each in make_traffic(config)])
    scenario = Scenario(
        cost,
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_colocated=num_colocated,
        scheduling=SchedulingConfig("fcfs"),
        slo=Objectives(inf, inf),
    )
    ran = scenario.simulate(make_traffic(dataclasses.replace(config, request_rate=3 * fitting.rate)))
    times_s = sorted(time_s for stream in ran.streams for time_s in stream.times_s)
    first, last = (int(share * len(times_s)) for share in (0.2, 0.7))
    tokens_per_s = (last - first) / (times_s[last] - times_s[first])
    assert tokens_per_s / (len(times_s) / 200) == pytest.approx(fitting.rate, rel=0.1)
