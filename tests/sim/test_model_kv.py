"""What a model's config adds to a cost model: KV in 8 bits, and blocks for a window of tokens only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from alignedserve.cli.simulate.compare import Comparison
from alignedserve.cli.simulate.config import SimConfig
from alignedserve.engine.choices import block_format, choose_num_blocks
from alignedserve.engine.config import EngineConfig
from alignedserve.kv.format import BlockFormat
from alignedserve.kv.groups import LayerGroups, layer_groups, one_group
from alignedserve.kv.span import KvSpan
from alignedserve.models.presets import PRESETS
from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.model_kv import ModelKv, with_kv
from alignedserve.sim.trace import Arrival, Lengths
from alignedserve.timing.cost_presets import cost_presets

COST = cost_presets()["opt-13b/a100-80gb"]
OPT_13B = PRESETS["opt-13b"]
ENGINE = EngineConfig("opt-13b", block_size=16, max_num_batched_tokens=64)
KV = ModelKv("opt-13b", block_format(ENGINE, OPT_13B, "float16"), OPT_13B.max_position)
BUDGET = COST.num_kv_tokens * COST.kv_bytes_per_token
WINDOW, MAX_MODEL_LEN = 256, 2048


def form_of(kv_cache_dtype: str) -> BlockFormat:
    """What an engine makes of it."""
    return block_format(replace(ENGINE, kv_cache_dtype=kv_cache_dtype), OPT_13B, "float16")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_the_same_memory_holds_what_an_engine_finds_room_for(kv_cache_dtype: str) -> None:
    form, cost = form_of(kv_cache_dtype), with_kv(COST, 16, kv_cache_dtype, model=KV)
    assert cost.kv_bytes_per_token * 16 == form.block_bytes
    config, span = replace(ENGINE, max_num_seqs=10_000), KvSpan(form.block_size)
    num_blocks = choose_num_blocks(config, form, MAX_MODEL_LEN, BUDGET, span)
    assert cost.num_kv_tokens // 16 == num_blocks
    # The pool has KV as instances have it.
    assert cost.pool_bytes_per_token == cost.kv_bytes_per_token


def test_attention_takes_as_long_for_the_same_bytes() -> None:
    near = structs.replace(COST, decode_far_s=1e-7, num_near_tokens=10_000)
    halved = with_kv(near, 16, "fp8", model=KV)
    attention_s = near.decode_attention([5000, 7000])
    assert halved.decode_attention([10_000, 14_000]) == pytest.approx(attention_s)
    # A long chunk computes for longer than it reads KV.
    assert halved.iteration([(0, 2048)], []) == near.iteration([(0, 2048)], [])


def test_a_cost_model_of_kv_in_8_bits_stays_as_it_is() -> None:
    measured = structs.replace(COST, kv_bytes_per_token=form_of("int8").block_bytes // 16)
    assert with_kv(measured, 16, "auto", model=KV) == measured
    assert with_kv(measured, 16, "int8", model=KV) == measured
    fewer = with_kv(measured, 16, "fp8", model=KV)
    assert fewer.kv_bytes_per_token == form_of("fp8").block_bytes // 16 < measured.kv_bytes_per_token
    with pytest.raises(ValueError, match="pool_kv_dtype='int8' and kv_cache_dtype='int8'"):
        with_kv(measured, 16, "auto", "int8", KV)


def test_bytes_say_in_which_dtype_the_cost_model_is() -> None:
    whole = structs.replace(COST, kv_bytes_per_token=2 * COST.kv_bytes_per_token)
    # Of 16 slots of four bytes: 16 codes, and two bounds of four bytes.
    assert with_kv(whole, 16, pool_kv_dtype="int8", model=KV).pool_bytes_per_token == pytest.approx(
        24 / 64 * whole.kv_bytes_per_token
    )
    other = structs.replace(COST, kv_bytes_per_token=1000)
    with pytest.raises(
        ValueError, match="cost: is for 1000 bytes of KV per token, but opt-13b has 1638400 in float32"
    ):
        with_kv(other, 16, model=KV)
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8': needs a model"):
        with_kv(COST, 16, "fp8")
    with pytest.raises(ValueError, match="cost: is for a model with a window of 512 tokens"):
        with_kv(COST.with_window(512), 16)


def most_at_once(groups: LayerGroups, num_columns: int) -> int:
    """The most requests of the longest kind that decode in one iteration."""
    window = 0 if groups.num_full else groups.window
    kv = replace(KV, max_model_len=MAX_MODEL_LEN, window=window, groups=groups)
    num_whole = MAX_MODEL_LEN // 16
    config = SimConfig(policy=("fcfs",), pool_memory_bytes=12 * num_whole * 16 * COST.kv_bytes_per_token)
    cost = structs.replace(COST, num_kv_tokens=16 * num_columns)
    # Far enough ahead that nobody is admitted who has to leave again.
    scheduling = SchedulingConfig(admit_ahead=32)
    comparison = Comparison(config, cost, ENGINE, RouterConfig(link="host"), scheduling, kv)
    (scenario,) = comparison.scenarios
    assert comparison.max_model_len == MAX_MODEL_LEN
    # Until then none is so near its end that it needs fewer blocks.
    ran = scenario.simulate([Arrival(0.0, Lengths(1000, MAX_MODEL_LEN - 1000))] * 12, until_s=8.0)
    assert max(len(stream.tokens) for stream in ran.streams) > 100
    return max(each.num_tokens for of_one in ran.lifetimes.iterations.values() for each in of_one)


def test_an_instance_holds_as_many_requests_as_windows() -> None:
    num_columns = MAX_MODEL_LEN // 16
    # As a live pool counts what it hands a live decode instance.
    most_columns = KvSpan(16, WINDOW, max_step=1).most
    assert most_at_once(one_group(40, WINDOW), num_columns) == num_columns // most_columns == 6
    assert most_at_once(one_group(40), num_columns) == 1


def test_layers_that_attend_to_all_tokens_hold_blocks_for_all() -> None:
    num_columns = 2 * MAX_MODEL_LEN // 16
    groups = layer_groups([None, *([WINDOW] * 3)] * 10, 40)
    assert (groups.num_full, groups.num_sliding) == (1, 3)
    # As a live pool counts them, of a request with 100 tokens of its answer.
    span = KvSpan(16, WINDOW, 1, groups.num_full, groups.num_sliding)
    most_blocks = span.num_at_most(span.num_columns(1100))
    assert most_at_once(one_group(40), num_columns) == 3
    assert most_at_once(groups, num_columns) == 4 * num_columns // most_blocks == 7
