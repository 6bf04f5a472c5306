from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from alignedserve.kernels.quantised import FP8, INT4, INT8, MXFP4
from tests.kernels.triton.harness import DEVICE, apart, assert_close, randn

pytest.importorskip("triton")

from alignedserve.kernels.triton.coded_weight import CodedWeight
from alignedserve.kernels.triton.expert_products import (
    ExpertTuning,
    expert_products,
    expert_tuning,
    max_tiles,
)
from alignedserve.kernels.triton.expert_route import BLOCK, ExpertRouting, route_rows, route_rows_torch
from alignedserve.kernels.triton.experts import mix_experts, mix_experts_torch
from tests.kernels.triton.coded_weights import random_weight

pytestmark = pytest.mark.slow

# The interpreter multiplies matrices of bfloat16 as if they were integers.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
# Experts, choices of a row, hidden, inner.
SHAPES = {
    "two of eight": (8, 2, 48, 40),
    "odd": (5, 3, 33, 17),
    "all": (3, 3, 16, 70),
    "one": (20, 1, 64, 32),
}
TUNING = ExpertTuning(rows=16, outputs=16, inner=32, num_warps=4, num_stages=2)


def weights_of(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    num_experts, _, hidden, inner = shape
    gate_up = randn(num_experts, 2 * inner, hidden, dtype=dtype) * hidden**-0.5
    return gate_up, randn(num_experts, hidden, inner, dtype=dtype) * inner**-0.5


def assert_same(actual: ExpertRouting, expected: ExpertRouting) -> None:
    for name in ("chosen", "order", "counts"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    torch.testing.assert_close(actual.weights.double(), expected.weights, rtol=1e-5, atol=1e-7)


@pytest.mark.drawn(one_in=5)
@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "num_experts", "top_k"), [(1, 128, 8), (1, 5, 5), (7, 5, 3), (40, 3, 3)])
def test_rows_choose_and_choices_are_in_the_order_of_experts(
    rows: int, num_experts: int, top_k: int, dtype: torch.dtype, normalises: bool
) -> None:
    logits = apart(randn(rows, num_experts, dtype=dtype) * 3)
    assert_same(route_rows(logits, top_k, normalises), route_rows_torch(logits, top_k, normalises))


def test_more_choices_than_one_block_are_in_order() -> None:
    top_k, rows = 12, BLOCK // 12 + 1
    logits = randn(rows, 19)
    assert_same(route_rows(logits, top_k, normalises=True), route_rows_torch(logits, top_k, normalises=True))


def test_without_rows_no_expert_is_hit() -> None:
    routing = route_rows(randn(0, 6), 2, normalises=True)
    assert routing.counts.tolist() == [0] * 6 and not len(routing.order)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_equal_and_broken_logits_choose_experts_that_exist() -> None:
    logits = torch.zeros(5, 6, device=DEVICE)
    logits[1, 4], logits[2] = torch.nan, -torch.inf
    logits[3, 2], logits[3, 5] = torch.inf, torch.nan
    routing = route_rows(logits, 3, normalises=True)
    assert routing.chosen.tolist() == [[0, 1, 2], [4, 0, 1], [0, 1, 2], [2, 5, 0], [0, 1, 2]]
    assert routing.weights[[0, 4]].isfinite().all() and not routing.weights[1:4].isfinite().any()


@pytest.mark.drawn(one_in=7)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5, 35])
@pytest.mark.parametrize("name", SHAPES)
def test_odd_sizes_and_numbers_of_rows(name: str, rows: int, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    num_experts, top_k, hidden, _ = shape
    x, logits = randn(rows, hidden, dtype=dtype), randn(rows, num_experts, dtype=dtype)
    gate_up, down = weights_of(shape, dtype)
    residual = randn(rows, hidden, dtype=dtype)
    expected = mix_experts_torch(x, logits, gate_up, down, top_k, True, residual)
    assert_close(mix_experts(x, logits, gate_up, down, top_k, True, residual, tuning=TUNING), expected)
    # The residual may be the result.
    assert mix_experts(x, logits, gate_up, down, top_k, True, residual, residual) is residual
    assert_close(residual, expected)


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 35])
@pytest.mark.parametrize("name", ["two of eight", "odd"])
def test_biases_and_the_clamped_swiglu(name: str, rows: int, dtype: torch.dtype) -> None:
    """The limit is one that many sums are beyond."""
    shape = SHAPES[name]
    num_experts, top_k, hidden, inner = shape
    x, logits = randn(rows, hidden, dtype=dtype), randn(rows, num_experts, dtype=dtype)
    gate_up, down = weights_of(shape, dtype)
    biases = randn(num_experts, 2 * inner, dtype=dtype), randn(num_experts, hidden, dtype=dtype)
    each: tuple[dict[str, Any], ...] = (
        {"biases": biases},
        {"swiglu": (1.7, 0.7)},
        {"biases": biases, "swiglu": (1.7, 0.7)},
    )
    for options in each:
        expected = mix_experts_torch(x, logits, gate_up, down, top_k, True, x, **options)
        assert_close(
            mix_experts(x, logits, gate_up, down, top_k, True, x, tuning=TUNING, **options),
            expected,
        )


# Hidden and inner: groups of 32 and 64 leave some of a tile's inputs over, and a scale for all inputs does not depend
# on them; MXFP4 has whole groups.
CODED_SHAPES = {"whole groups": (8, 2, 160, 96), "odd": (5, 3, 33, 17)}
CODED = [
    (INT8, None, False, "odd"),
    (INT8, 64, True, "whole groups"),
    (INT4, 32, False, "odd"),
    (INT4, 32, False, "whole groups"),
    (INT4, 96, True, "whole groups"),
    (FP8, None, False, "odd"),
    (FP8, 64, False, "whole groups"),
    (MXFP4, 32, False, "whole groups"),
]


# Each kind once, as many as there are dtypes and numbers of rows.
@pytest.mark.slow
@pytest.mark.drawn(one_in=len(DTYPES) * 2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 35])
@pytest.mark.parametrize(("kind", "group", "has_zeros", "name"), CODED, ids=str)
def test_experts_in_codes_are_what_the_codes_stand_for(
    kind: str, group: int | None, has_zeros: bool, name: str, rows: int, dtype: torch.dtype
) -> None:
    """With biases and the clamped SwiGLU, and without."""
    num_experts, top_k, hidden, inner = CODED_SHAPES[name]
    x, logits = randn(rows, hidden, dtype=dtype), randn(rows, num_experts, dtype=dtype)
    coded, values = [], []
    for num_out, num_in in ((2 * inner, hidden), (hidden, inner)):
        weight = random_weight(kind, group or num_in, has_zeros, num_in, num_experts * num_out)
        coded.append(CodedWeight.of(weight, x.device))
        # The kernel rounds them to the dtype before it multiplies them.
        values.append(weight.dequantised().view(num_experts, num_out, num_in).to(x))
    biases = randn(num_experts, 2 * inner, dtype=dtype), randn(num_experts, hidden, dtype=dtype)
    each: tuple[dict[str, Any], ...] = ({}, {"biases": biases, "swiglu": (1.7, 0.7)})
    gate_up, down = coded
    for options in each:
        expected = mix_experts_torch(x, logits, values[0], values[1], top_k, True, x, **options)
        found = mix_experts(x, logits, gate_up, down, top_k, True, x, tuning=TUNING, **options)
        assert_close(found, expected)
        # That of so many rows.
        found = mix_experts(x, logits, gate_up, down, top_k, True, x, **options)
        assert_close(found, expected)


def test_a_row_that_is_not_finite_stays_so() -> None:
    shape = SHAPES["two of eight"]
    gate_up, down = weights_of(shape, torch.float32)
    x, logits = randn(3, 48), randn(3, 8)
    x[1] = torch.nan
    mixed = mix_experts(x, logits, gate_up, down, 2, True, torch.zeros_like(x), swiglu=(1.7, 0.7))
    assert mixed[1].isnan().all() and mixed[[0, 2]].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_rows_that_share_its_experts(dtype: torch.dtype) -> None:
    shape = SHAPES["two of eight"]
    gate_up, down = weights_of(shape, dtype)
    x, logits = randn(40, 48, dtype=dtype), randn(40, 8, dtype=dtype)
    whole = mix_experts(x, logits, gate_up, down, 2, True, x, tuning=TUNING)
    for rows in (1, 2, 13):
        some = slice(2 * rows, 3 * rows)
        part = mix_experts(x[some], logits[some], gate_up, down, 2, True, x[some], tuning=TUNING)
        assert torch.equal(part, whole[some]), rows


@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40])
def test_all_rows_through_the_same_experts(rows: int) -> None:
    """Few experts with many tiles, and the others with none."""
    shape = SHAPES["one"]
    gate_up, down = weights_of(shape, torch.float32)
    x, logits = randn(rows, 64), torch.zeros(rows, 20, device=DEVICE)
    logits[:, 13] = 1
    logits[rows // 2 :, 19] = 2
    actual = mix_experts(x, logits, gate_up, down, 1, False, x, tuning=TUNING)
    assert_close(actual, mix_experts_torch(x, logits, gate_up, down, 1, False, x))


def test_every_choice_has_a_row_of_its_own_whatever_the_tiles() -> None:
    shape = SHAPES["two of eight"]
    gate_up, down = weights_of(shape, torch.float32)
    x = randn(20, 48)
    routing = route_rows(randn(20, 8), 2, normalises=True)
    for rows in (16, 32):
        each = expert_products(x, gate_up, down, routing, replace(TUNING, rows=rows))
        for choice, expert in enumerate(routing.chosen.flatten().tolist()):
            gate, up = (gate_up[expert] @ x[choice // 2]).chunk(2)
            assert_close(each[choice], down[expert] @ (torch.nn.functional.silu(gate) * up))


def test_as_many_tiles_are_launched_as_there_may_be() -> None:
    """The worst: of every expert one choice more than fills its tiles."""
    for num_experts, rows in ((8, 16), (128, 16), (5, 32)):
        for full in (0, 1, 3):
            num_choices = num_experts * (full * rows + 1)
            assert max_tiles(num_choices, num_experts, rows) == num_experts * (full + 1)
            counts = torch.randint(num_experts, (num_choices,)).bincount()
            assert max_tiles(num_choices, num_experts, rows) >= -(-counts // rows).sum()
    assert max_tiles(8, 128, 16) == 8


def test_a_broken_row_breaks_no_other() -> None:
    shape = SHAPES["odd"]
    gate_up, down = weights_of(shape, torch.float32)
    x, logits = randn(6, 33), randn(6, 5)
    whole = mix_experts(x, logits, gate_up, down, 3, False, x, tuning=TUNING)
    broken = x.clone()
    broken[2] = torch.nan
    result = mix_experts(broken, logits, gate_up, down, 3, False, broken, tuning=TUNING)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(result[others], whole[others]) and result[2].isnan().all()


def test_more_choices_per_expert_take_larger_tiles() -> None:
    found = [expert_tuning(rows * 8, 128, 2).rows for rows in (1, 256, 257, 1024, 1025, 8192)]
    assert found == [16, 16, 32, 32, 128, 128]


def test_wrong_arguments_are_named() -> None:
    gate_up, down = weights_of(SHAPES["one"], torch.float32)
    x, logits = randn(4, 64), randn(4, 20)
    with pytest.raises(ValueError, match="top_k must be from 1 to the 20 experts, not 21"):
        mix_experts(x, logits, gate_up, down, 21, True, x)
    with pytest.raises(ValueError, match="^logits must have a row of 20 experts for each of 4 rows"):
        mix_experts(x, randn(4, 19), gate_up, down, 1, True, x)
    with pytest.raises(ValueError, match="^gate_up must be contiguous"):
        mix_experts(x, logits, gate_up[:, 1:], down, 1, True, x)
    with pytest.raises(ValueError, match="^down must be torch.float32"):
        mix_experts(x, logits, gate_up, down.half(), 1, True, x)
    coded = CodedWeight.of(random_weight(INT8, 64, False, 64, 20 * 64), x.device)
    with pytest.raises(
        ValueError, match=r"^gate_up must be contiguous codes of \[1280, 64\], not of \(1279, 64"
    ):
        mix_experts(x, logits, coded.rows(1, 1280), down, 1, True, x)
    with pytest.raises(ValueError, match="^residual must be contiguous"):
        mix_experts(x, logits, gate_up, down, 1, True, x[:3])
    with pytest.raises(ValueError, match="^logits must be of at most 1024 experts"):
        route_rows(randn(1, 1025), 1, normalises=True)
