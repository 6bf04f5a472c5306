from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from alignedserve.instance.profile.facts import experts_of
from alignedserve.instance.profile.fit import fit_decodes
from alignedserve.instance.profile.grid import grid
from alignedserve.instance.profile.points import Measured
from alignedserve.models.config import ModelConfig
from alignedserve.models.presets import PRESETS
from alignedserve.timing.cost_presets import load_cost_model
from benchmarks.gpu.ceilings import matmul_flops
from benchmarks.gpu.profile import Activity, activities_of, busy_seconds, table
from benchmarks.gpu.roofline import (
    Work,
    chunk_work,
    decode_work,
    expert_values,
    hit_experts,
    kv_values_per_token,
    matrix_values,
    vector_values,
)
from tests.instance.profile.profiles import REACH


@pytest.mark.parametrize(
    ("preset", "billions"), [("llama-3.1-8b", 8.030), ("llama-2-7b", 6.738), ("qwen3-8b", 8.191)]
)
def test_weights_add_up_to_what_the_authors_say(preset: str, billions: float) -> None:
    config = PRESETS[preset]
    embedding = config.vocab_size * config.hidden_size
    assert (matrix_values(config) + vector_values(config) + embedding) / 1e9 == pytest.approx(
        billions, abs=5e-4
    )


@pytest.mark.parametrize(
    ("preset", "billions"), [("opt-13b", 12.853), ("opt-6.7b", 6.658), ("qwen3-0.6b", 0.596)]
)
def test_tied_weights_count_once(preset: str, billions: float) -> None:
    config = PRESETS[preset]
    positions = (config.max_position + 2) * config.hidden_size if config.architecture == "opt" else 0
    assert (matrix_values(config) + vector_values(config) + positions) / 1e9 == pytest.approx(
        billions, abs=5e-4
    )


def test_a_step_reads_weights_once_and_the_kv_of_all_prefixes() -> None:
    config = PRESETS["llama-3.1-8b"]
    kv_bytes = 2 * kv_values_per_token(config)
    assert kv_bytes == 128 << 10
    one, two = decode_work(config, [1024], 2), decode_work(config, [1024, 512], 2)
    assert two.num_bytes - one.num_bytes == 513 * kv_bytes + 2 * config.hidden_size
    assert one.num_bytes == pytest.approx(15.01e9 + 1025 * kv_bytes, rel=1e-3)
    attention = 4 * 32 * 128 * 32
    assert one.num_flops == 2 * matrix_values(config) + attention * 1024
    assert two.num_flops == 2 * 2 * matrix_values(config) + attention * 1536


def test_matrices_in_fewer_bits_are_fewer_bytes() -> None:
    config = PRESETS["llama-3.1-8b"]
    whole, int8, int4 = (decode_work(config, [1024], 2, each) for each in (None, "int8", "int4"))
    assert whole.num_bytes - int8.num_bytes == matrix_values(config)
    head = config.vocab_size * config.hidden_size
    assert int8.num_bytes - int4.num_bytes == (matrix_values(config) - head) * (1 - 0.5 - 2 / 32)
    assert whole.num_flops == int4.num_flops


def test_experts_in_fewer_bits_are_fewer_bytes() -> None:
    config = PRESETS["qwen3-30b-a3b"]
    whole, fp8 = (decode_work(config, [9] * 3, 2, each) for each in (None, "fp8"))
    hit = expert_values(config) * hit_experts(config, 3)
    # Routers stay as they are.
    routers = 48 * 128 * 2048
    assert whole.num_bytes - fp8.num_bytes == pytest.approx(matrix_values(config) - routers + hit)


@pytest.mark.parametrize("preset", ["qwen3-30b-a3b", "mixtral-8x7b"])
def test_the_cost_models_of_mixtures_are_what_they_say_they_are(preset: str) -> None:
    """65 % of the rate at which an H200 was measured to copy."""
    config, cost = PRESETS[preset], load_cost_model(f"{preset}/h200")
    assert cost.kv_bytes_per_token == 2 * kv_values_per_token(config)
    for batch in (1, 2, 8, 32, 128, 256):
        work = decode_work(config, [500] * batch, 2)
        assert cost.iteration([], [500] * batch) == pytest.approx(
            work.num_bytes / (0.65 * 4.258e12), rel=2e-3
        )


def test_the_roofline_of_a_mixture_is_fitted_with_its_experts_and_not_without() -> None:
    config = PRESETS["qwen3-30b-a3b"]
    points = [each for each in grid(REACH) if each.kind == "decode"]
    measured = [
        Measured(each, 5e-4 + decode_work(config, each.lengths, 2).seconds(4.2e12, 1e99)) for each in points
    ]
    error: dict[bool, float] = {}
    for is_mixture in (False, True):
        fit = fit_decodes(measured, experts_of(config) if is_mixture else None)
        found = [
            fit.seconds(
                *(np.array([each]) for each in (len(lengths), sum(lengths), share(config, len(lengths))))
            )
            for lengths in (each.lengths for each in points)
        ]
        error[is_mixture] = float(
            np.median([abs(a[0] / b.seconds - 1) for a, b in zip(found, measured, strict=True)])
        )
    assert error[True] < 0.001 and error[False] > 0.2


def share(config: ModelConfig, num_tokens: int) -> float:
    experts = experts_of(config)
    assert experts is not None
    return experts.hit_share(num_tokens)


def test_the_roofline_is_the_longer_of_both_times() -> None:
    assert Work(num_bytes=10, num_flops=10).seconds(bytes_per_s=5, flops_per_s=10) == 2
    assert Work(num_bytes=10, num_flops=100).seconds(bytes_per_s=5, flops_per_s=10) == 10


def test_a_product_has_two_operations_per_pair() -> None:
    assert matmul_flops(2, 3, 4) == 48


def test_busy_is_the_union_of_what_ran() -> None:
    activities = [
        Activity("a", 0.0, 2.0),
        Activity("b", 1.0, 1.5),
        Activity("c", 1.5, 3.0),
        Activity("d", 5.0, 6.0),
    ]
    assert busy_seconds(activities) == 4.0
    assert busy_seconds([]) == 0.0


def test_activities_are_read_off_a_trace_and_summed_by_name() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "attention", "ts": 2000.0, "dur": 500.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 1000.0, "dur": 250.0},
        {"ph": "X", "cat": "kernel", "name": "attention", "ts": 3000.0, "dur": 1500.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 900.0, "dur": 50.0},
        {"ph": "i", "cat": "kernel", "name": "no duration", "ts": 900.0},
    ]
    activities = activities_of({"traceEvents": events})
    assert [activity.name for activity in activities] == ["Memcpy DtoH", "attention", "attention"]
    assert busy_seconds(activities) == pytest.approx(2.25e-3)
    lines = table(activities, repeats=2).splitlines()
    assert "1.125 ms in all" in lines[0]
    assert lines[1].split() == ["1.0000", "88.9%", "1.0", "attention"]


@pytest.mark.parametrize(
    ("preset", "billions", "active"), [("qwen3-30b-a3b", 30.532, 3.353), ("mixtral-8x7b", 46.703, 12.879)]
)
def test_experts_add_up_to_what_the_authors_say(preset: str, billions: float, active: float) -> None:
    config = PRESETS[preset]
    assert config.moe is not None
    beside = matrix_values(config) + vector_values(config) + config.vocab_size * config.hidden_size
    each = expert_values(config)
    assert (beside + config.moe.num_experts * each) / 1e9 == pytest.approx(billions, abs=5e-4)
    assert (beside + config.moe.top_k * each) / 1e9 == pytest.approx(active, abs=5e-3)


def test_a_step_reads_the_experts_that_its_batch_hits() -> None:
    config = PRESETS["qwen3-30b-a3b"]
    each, kv = 2 * expert_values(config), kv_values_per_token(config)
    assert hit_experts(config, 1) == 8
    assert hit_experts(config, 2) == pytest.approx(8 + 8 * 120 / 128)
    assert hit_experts(config, 256) == pytest.approx(128, rel=1e-6)
    one, two = decode_work(config, [9], 2), decode_work(config, [9, 9], 2)
    assert two.num_bytes - one.num_bytes == pytest.approx(7.5 * each + 20 * kv + 2 * config.hidden_size)
    assert two.num_flops == 2 * one.num_flops
    assert one.num_flops - 4 * 32 * 128 * 48 * 9 == 2 * matrix_values(config) + 8 * each
    assert hit_experts(PRESETS["qwen3-8b"], 4) == expert_values(PRESETS["qwen3-8b"]) == 0


SMALL = replace(
    PRESETS["llama-3.1-8b"],
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=32,
)


@pytest.mark.parametrize(
    ("windows", "num_kv_tokens", "num_pairs"),
    # tokens 4 and 5 of a prompt: what the last one attends to, and what both do, in both layers
    [((), 5 + 5, (4 + 5) + (4 + 5)), ((2, None), 2 + 5, (2 + 2) + (4 + 5))],
)
def test_a_chunk_computes_all_its_rows_and_one_row_of_the_output_layer(
    windows: tuple[int | None, ...], num_kv_tokens: int, num_pairs: int
) -> None:
    layer = 8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 16
    head, norms, embedding = 32 * 8, 5 * 8, 8
    # keys and values of one head of 4, and those of a token that is written in both layers
    kv = (num_kv_tokens + 2) * 2 * 4
    work = chunk_work(replace(SMALL, sliding_windows=windows), before=3, count=2, value_bytes=2)
    assert work.num_bytes == 2 * (2 * layer + head + norms + embedding + kv)
    # A product and a sum: with each weight; and for each value of 2 heads, with a key and with a value.
    assert work.num_flops == 2 * 2 * (2 * layer) + 2 * head + 2 * 2 * 2 * 4 * num_pairs


def test_a_chunk_of_one_token_is_a_decode() -> None:
    for name in ("llama-3.1-8b", "gemma-3-4b", "qwen3-30b-a3b"):
        chunk, decode = chunk_work(PRESETS[name], 99, 1, 2), decode_work(PRESETS[name], [100], 2)
        assert (chunk.num_bytes, chunk.num_flops) == (decode.num_bytes, decode.num_flops), name


def test_a_chunk_of_a_mixture_reads_the_experts_that_its_rows_hit() -> None:
    config = PRESETS["qwen3-30b-a3b"]
    one, two = chunk_work(config, 98, 1, 2), chunk_work(config, 98, 2, 2)
    kv_bytes = 2 * kv_values_per_token(config)
    assert two.num_bytes - one.num_bytes == pytest.approx(7.5 * 2 * expert_values(config) + kv_bytes)
