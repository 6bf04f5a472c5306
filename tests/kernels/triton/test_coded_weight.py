"""Linear kernels with quantised weights, compared with a float64 product of the decoded weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from alignedserve.kernels.int4 import quantise_int4
from alignedserve.kernels.quantised import (
    FP8,
    FP8_DTYPE,
    INT4,
    INT8,
    MXFP4,
    QuantisedWeight,
    quantise_fp8,
    quantise_int8,
)
from tests.kernels.triton.coded_weights import random_weight
from tests.kernels.triton.harness import DEVICE, assert_close, poison, randn

pytest.importorskip("triton")

from alignedserve.kernels.triton.coded_weight import CodedWeight, dequantise
from alignedserve.kernels.triton.gemv import SILU_GATED, GemvTuning, coded_gemv_tuning, gemv, gemv_torch
from alignedserve.kernels.triton.skinny_linear import SkinnyScratch, SkinnyTuning, skinny_linear
from tests.kernels.triton.test_skinny_linear import DTYPES, reference

# Groups: one for all inputs, of a power of two, of none, and such that the last one is not full.
CASES = [
    (INT8, 320, False),
    (INT8, 96, True),
    (INT8, 128, False),
    (INT4, 32, False),
    (INT4, 96, True),
    (INT4, 128, True),
    (INT4, 320, False),
    (FP8, 320, False),
    (FP8, 128, False),
    (FP8, 6, False),
    (MXFP4, 32, False),
]
NUM_IN, NUM_OUT = 320, 72
DEVICE_ = torch.device(DEVICE)
TUNING = SkinnyTuning(outputs=64, inner=128, num_warps=4, num_stages=3)


def values(weight: QuantisedWeight) -> torch.Tensor:
    return weight.dequantised().to(DEVICE)


@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize(("kind", "group", "has_zeros"), CASES, ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_is_what_its_codes_stand_for(
    kind: str, group: int, has_zeros: bool, scale_dtype: torch.dtype
) -> None:
    """To the bit in float32: of codes' differences and scales there is one rounding."""
    weight = random_weight(kind, group, has_zeros, NUM_IN, NUM_OUT, scale_dtype=scale_dtype)
    coded = CodedWeight.of(weight, DEVICE_)
    assert coded.shape == (NUM_OUT, NUM_IN) and coded.kind == kind
    found = dequantise(coded, poison(NUM_OUT, NUM_IN))
    assert torch.equal(found, values(weight))
    assert torch.equal(dequantise(coded.rows(30, 60), poison(30, NUM_IN)), found[30:60])
    half = dequantise(coded, poison(NUM_OUT, NUM_IN, dtype=torch.float16))
    assert torch.equal(half, found.half())


@pytest.mark.parametrize("num_in", [1, 31, 33, 200])
@pytest.mark.parametrize("quantise", [quantise_int8, quantise_int4, quantise_fp8])
def test_inputs_that_fill_nothing(quantise: object, num_in: int) -> None:
    weight: QuantisedWeight = quantise(torch.randn(7, num_in))  # type: ignore[operator]
    coded = CodedWeight.of(weight, DEVICE_)
    assert torch.equal(dequantise(coded, poison(7, num_in)), values(weight))
    x, out = randn(1, num_in), poison(1, 7)
    gemv(x, coded, out, GemvTuning(4, 64, 4, 2))
    assert_close(out[0], gemv_torch(x[0], values(weight)).float())


def test_all_codes_of_e4m3() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 0x7F != 0x7F]
    codes = codes.view(1, -1).view(FP8_DTYPE)
    weight = QuantisedWeight(FP8, codes, torch.ones(1, 1), None, codes.shape[1])
    found = dequantise(CodedWeight.of(weight, DEVICE_), poison(*codes.shape))
    assert torch.equal(found, codes.float().to(DEVICE))


def test_all_codes_of_e2m1() -> None:
    """With the least and the largest of their scales, but for the values that float32 has not."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 2)
    scales = torch.tensor([[2.0**-126], [1.0], [2.0**125]], dtype=torch.bfloat16)
    weight = QuantisedWeight(MXFP4, codes, scales, None, 32)
    found = dequantise(CodedWeight.of(weight, DEVICE_), poison(*codes.shape))
    # Zeros have signs.
    assert torch.equal(found.view(torch.int32), values(weight).view(torch.int32))


@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize(("kind", "group", "has_zeros"), CASES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tuning"),
    [(torch.float32, GemvTuning(16, 64, 4, 2)), (torch.bfloat16, None)],
    ids=["in pieces", "at once"],
)
def test_one_row_with_everything_around_it(
    kind: str, group: int, has_zeros: bool, dtype: torch.dtype, tuning: GemvTuning | None
) -> None:
    weight = random_weight(kind, group, has_zeros, NUM_IN, NUM_OUT)
    coded = CodedWeight.of(weight, DEVICE_)
    x, out = randn(1, NUM_IN, dtype=dtype), poison(1, NUM_OUT, dtype=dtype)
    extras: dict[str, Any] = dict(
        bias=randn(NUM_OUT, dtype=dtype),
        residual=randn(NUM_OUT, dtype=dtype),
        norm=randn(NUM_IN, dtype=dtype),
        norm_eps=1e-5,
    )
    gemv(x, coded, out, tuning or coded_gemv_tuning(coded, is_gated=False), **extras)
    assert_close(out[0], gemv_torch(x[0], values(weight), **extras).to(dtype))


@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize(("kind", "group", "has_zeros"), CASES, ids=str)
def test_a_gated_layer_of_one_row(kind: str, group: int, has_zeros: bool) -> None:
    weight = random_weight(kind, group, has_zeros, NUM_IN, NUM_OUT)
    x, out = randn(1, NUM_IN), poison(1, NUM_OUT // 2)
    coded = CodedWeight.of(weight, DEVICE_)
    gemv(x, coded, out, coded_gemv_tuning(coded, is_gated=True), activation=SILU_GATED)
    assert_close(out[0], gemv_torch(x[0], values(weight), activation=SILU_GATED).float())


@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "group", "has_zeros"), CASES, ids=str)
@pytest.mark.parametrize(("rows", "num_programs"), [(2, 1), (33, 4)])
def test_few_rows_however_they_are_cut(
    kind: str, group: int, has_zeros: bool, dtype: torch.dtype, rows: int, num_programs: int
) -> None:
    weight = random_weight(kind, group, has_zeros, NUM_IN, NUM_OUT)
    coded = CodedWeight.of(weight, DEVICE_)
    x, bias = randn(rows, NUM_IN, dtype=dtype), randn(NUM_OUT, dtype=dtype)
    stream = randn(rows, NUM_OUT, dtype=dtype)
    # The kernel rounds the values to the dtype before it multiplies them.
    expected = reference(x, values(weight).to(dtype), bias=bias, residual=stream)
    scratch = SkinnyScratch(num_programs, DEVICE_)
    skinny_linear(x, coded, stream, TUNING, bias=bias, residual=stream, scratch=scratch)
    assert_close(stream, expected)
    assert not scratch.num_done.any()


def test_wrong_shapes_are_named() -> None:
    coded = CodedWeight.of(random_weight(INT4, 32, False, NUM_IN, NUM_OUT), DEVICE_)
    with pytest.raises(ValueError, match=r"weight must be contiguous \[outputs, 64\], not \(72, 320\)"):
        gemv(randn(64), coded, randn(NUM_OUT), GemvTuning(4, 64, 4, 2))
    with pytest.raises(ValueError, match=r"weight must be contiguous \[outputs, 64\], not \(72, 320\)"):
        skinny_linear(randn(2, 64, dtype=torch.float16), coded, randn(2, NUM_OUT), TUNING)
    with pytest.raises(ValueError, match="out must"):
        dequantise(coded, randn(NUM_OUT, 64))
