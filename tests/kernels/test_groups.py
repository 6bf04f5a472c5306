"""Weights in codes, with groups, zeros and FP8: the native kernel does what the reference says, and both what the codes
stand for."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
import torch

from alignedserve.kernels.cpu.weights import PackedWeight
from alignedserve.kernels.quantised import (
    BITS,
    BLOCK,
    E2M1,
    FP8,
    FP8_DTYPE,
    INT4,
    INT8,
    MXFP4,
    ZEROS,
    QuantisedWeight,
    linear_quantised,
    quantise_fp8,
    side_by_side,
)
from alignedserve.ops.base import Activation, Ops
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.torch_ops import TorchOps
from tests.kernels.harness import DTYPES, TOLERANCE, evaluate, randn

# Processors without fused multiplication and addition round twice where a scale is float32.
IS_FUSED = os.environ.get("ALIGNEDSERVE_CPU") != "x86-64"
ROWS = [0, 1, 2, 5, 6, 7, 13, 250]
GROUPS = [32, 64, 128, None]


def weight_of(
    kind: str, num_out: int, num_in: int, group: int | None, has_zeros: bool, wide: bool = True, seed: int = 0
) -> QuantisedWeight:
    """Random codes, scales and zeros. `group` None: one for all inputs."""
    generator = torch.Generator().manual_seed(seed)
    group = group or num_in
    num_groups = -(-num_in // group)
    if kind == FP8:
        values = torch.randn(num_out, num_in, generator=generator) * 100
        # A tenth of them is so small that it has no exponent.
        values *= torch.where(torch.rand(values.shape, generator=generator) < 0.1, 1e-4, 1.0)
        codes = values.clamp(-448, 448).to(FP8_DTYPE)
    else:
        codes = torch.randint(0, 1 << BITS[kind], (num_out, num_in), generator=generator).byte()
    scales = torch.rand(num_out, num_groups, generator=generator) + 0.1
    if kind == MXFP4:
        scales = scales.log2().round().exp2()
    zeros = (
        torch.randint(0, 16 if kind == INT4 else 256, scales.shape, generator=generator).byte()
        if has_zeros
        else None
    )
    return QuantisedWeight(kind, codes, scales if wide else scales.bfloat16(), zeros, group)


def both(
    dtype: torch.dtype,
    x: torch.Tensor,
    parts: list[QuantisedWeight],
    activation: Activation = Activation.NONE,
) -> tuple[torch.Tensor, torch.Tensor]:
    found = []
    biases = [randn(len(part.codes), seed=9 + i, dtype=torch.bfloat16) for i, part in enumerate(parts)]
    for ops in (CpuOps(dtype), TorchOps(dtype)):
        weight = ops.linear_weight(parts, biases, activation)
        found.append(evaluate(ops, x, lambda v, ops=ops, weight=weight: ops.linear(v, weight)))  # type: ignore[misc]
    return found[0], found[1]


def assert_same(native: torch.Tensor, expected: torch.Tensor) -> None:
    if IS_FUSED or not expected.numel():
        assert torch.equal(native, expected)
    else:
        error = (native.float() - expected.float()).abs().max() / expected.float().abs().max()
        assert error <= TOLERANCE[native.dtype]


@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("kind", [INT4, INT8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("group", "has_zeros", "wide"),
    [(32, True, True), (64, False, False), (128, True, False), (128, False, True), (None, True, True)],
)
def test_sums_of_groups_are_the_references(
    kind: str, dtype: torch.dtype, rows: int, group: int | None, has_zeros: bool, wide: bool
) -> None:
    """To the last bit, whether the last group is a whole one or not."""
    for num_in, widths in ((256, [64, 40]), (200, [31, 7, 7]), (33, [5])):
        x = randn(rows, num_in, seed=3, dtype=torch.bfloat16)
        x *= torch.logspace(-4, 4, max(rows, 1))[:rows].unsqueeze(1)
        parts = [
            weight_of(kind, width, num_in, group, has_zeros, wide, seed=i) for i, width in enumerate(widths)
        ]
        assert_same(*both(dtype, x.bfloat16().float(), parts))


@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("group", [*GROUPS, 2])
@pytest.mark.parametrize("wide", [True, False])
def test_fp8_is_the_references(dtype: torch.dtype, rows: int, group: int | None, wide: bool) -> None:
    for num_in, widths in ((256, [64, 140]), (199, [31, 7, 7]), (33, [5]), (1, [1])):
        x = randn(rows, num_in, seed=3, dtype=torch.bfloat16)
        parts = [weight_of(FP8, width, num_in, group, False, wide, seed=i) for i, width in enumerate(widths)]
        native, expected = both(dtype, x, parts)
        assert native.shape == expected.shape
        if rows:
            error = (native.float() - expected.float()).abs().max() / expected.float().abs().max()
            assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_mxfp4_is_the_references(dtype: torch.dtype, rows: int) -> None:
    for num_in, widths in ((256, [64, 140]), (96, [31, 7, 7]), (32, [1])):
        x = randn(rows, num_in, seed=3, dtype=torch.bfloat16)
        parts = [weight_of(MXFP4, width, num_in, 32, False, False, seed=i) for i, width in enumerate(widths)]
        native, expected = both(dtype, x, parts)
        assert native.shape == expected.shape
        if rows:
            error = (native.float() - expected.float()).abs().max() / expected.float().abs().max()
            assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_code_of_mxfp4_is_its_value(dtype: torch.dtype) -> None:
    """At each of the two places of a byte, with small and large scales: not with the least of all, whose values have no
    exponent in bfloat16, and become 0 where it is rounded to."""
    codes = torch.arange(16, dtype=torch.uint8).view(-1, 1).expand(-1, 32).contiguous()
    values = torch.tensor(E2M1)
    ops = CpuOps(dtype)
    for scale in (2.0**-124, 1.0, 2.0**124):
        weight = QuantisedWeight(MXFP4, codes, torch.full((16, 1), scale).bfloat16(), None, 32)
        packed = ops.linear_weight([weight])
        for rows in (1, 2, 7, 13):
            x = torch.zeros(rows, 32)
            x[:, rows % 2] = 1
            out = evaluate(ops, x, lambda v, packed=packed: ops.linear(v, packed))  # type: ignore[misc]
            assert torch.equal(out.float(), (values * scale).to(dtype).float().expand(rows, -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_code_of_fp8_is_its_value(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8_DTYPE)
    codes = codes[codes.float().isfinite()]
    weight = QuantisedWeight(FP8, codes.view(-1, 1).expand(-1, 2).contiguous(), torch.ones(254, 1), None, 2)
    ops = CpuOps(dtype)
    packed = ops.linear_weight([weight])
    for rows in (1, 2, 7, 13):
        x = torch.zeros(rows, 2)
        x[:, rows % 2] = 1
        out = evaluate(ops, x, lambda v: ops.linear(v, packed))
        assert torch.equal(out.float(), codes.float().expand(rows, -1))


@pytest.mark.parametrize("kind", [INT4, INT8, FP8, MXFP4])
@pytest.mark.parametrize("activation", list(Activation))
def test_activations(kind: str, activation: Activation) -> None:
    is_gated = activation.is_gated
    parts = [weight_of(kind, 41, 96, 32, kind in ZEROS, seed=i) for i in range(2 if is_gated else 1)]
    native, expected = both(torch.float32, randn(9, 96, seed=3) * 0.01, parts, activation)
    assert (native - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", [INT4, INT8, FP8])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("has_zeros", [True, False])
def test_what_the_codes_stand_for_is_multiplied(kind: str, group: int | None, has_zeros: bool) -> None:
    """Rows of integers are exact in eight bits here, so that nothing is lost but float32's last bits."""
    weight = weight_of(kind, 40, 256, group, has_zeros and kind != FP8)
    x = torch.randint(-127, 128, (5, 256), generator=torch.Generator().manual_seed(1)).float()
    x[:, 0] = 127
    expected = x.double() @ weight.dequantised().double().T
    error = (linear_quantised(x, weight, None).double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-6


@pytest.mark.parametrize("kind", [INT4, INT8, FP8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [32, None])
def test_a_row_does_not_depend_on_the_rows_beside_it(
    kind: str, dtype: torch.dtype, group: int | None
) -> None:
    x = randn(300, 70, dtype=torch.bfloat16)
    ops = CpuOps(dtype)
    weight = ops.linear_weight([weight_of(kind, 200, 70, group, kind != FP8)])
    whole = evaluate(ops, x, lambda v: ops.linear(v, weight))
    for rows in (1, 2, 3, 5, 6, 7, 12, 13, 100):
        start = 7 * rows % 200
        part = evaluate(ops, x[start : start + rows], lambda v: ops.linear(v, weight))
        assert torch.equal(part, whole[start : start + rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_mxfp4_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    x = randn(300, 64, dtype=torch.bfloat16)
    ops = CpuOps(dtype)
    weight = ops.linear_weight([weight_of(MXFP4, 200, 64, 32, False, wide=False)])
    whole = evaluate(ops, x, lambda v: ops.linear(v, weight))
    for rows in (1, 2, 6, 7, 13, 100):
        part = evaluate(ops, x[7 * rows % 200 :][:rows], lambda v: ops.linear(v, weight))
        assert torch.equal(part, whole[7 * rows % 200 :][:rows]), rows


def test_what_mxfp4_stands_for_is_multiplied_and_counted_as_it_is_kept() -> None:
    weight = weight_of(MXFP4, 64, 256, 32, False, wide=False)
    values = weight.dequantised()
    assert torch.equal(
        values.view(64, 8, 32) / weight.scales.float().unsqueeze(2),
        torch.tensor(E2M1)[weight.codes.int()].view(64, 8, 32),
    )
    assert torch.equal(weight.rows(1, 64, 2).dequantised(), values[1::2])
    assert torch.equal(weight.columns(64, 128).dequantised(), values[:, 64:128])
    x = randn(5, 256)
    error = (linear_quantised(x, weight, None) - x @ values.T).abs().max()
    assert error < 1e-5 * (x @ values.T).abs().max()
    assert weight.num_bytes == packed_bytes(CpuOps(torch.bfloat16), weight)


@pytest.mark.parametrize("kind", [INT4, INT8, FP8])
@pytest.mark.parametrize("group", [32, 64, None])
def test_a_part_of_the_outputs_or_inputs_is_that_part_of_the_values(kind: str, group: int | None) -> None:
    weight = weight_of(kind, 48, 200, group, kind != FP8)
    values = weight.dequantised()
    assert torch.equal(weight.rows(5, 30).dequantised(), values[5:30])
    ends = (0, 64, 128, 200)
    for first, end in pairwise(ends):
        assert torch.equal(weight.columns(first, end).dequantised(), values[:, first:end])
    if group:
        with pytest.raises(ValueError, match=f"inputs 0 to 33: must be whole groups of {group}"):
            weight.columns(0, 33)


def packed_bytes(ops: CpuOps, weight: QuantisedWeight) -> int:
    packed: PackedWeight = ops.linear_weight([weight])
    return packed.tiles.numel()


@pytest.mark.parametrize("kind", [INT4, INT8, FP8])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_the_bytes_are_those_that_are_kept(kind: str, group: int, has_zeros: bool, wide: bool) -> None:
    weight = weight_of(kind, 64, 256, group, has_zeros and kind != FP8, wide)
    assert weight.num_bytes == packed_bytes(CpuOps(torch.bfloat16), weight)


def test_what_mixes_scales_and_zeros_has_both() -> None:
    parts = [
        weight_of(INT4, 40, 128, 64, has_zeros=True, wide=False),
        weight_of(INT4, 24, 128, 64, has_zeros=False, wide=True),
    ]
    whole = side_by_side(parts)
    assert torch.equal(whole.dequantised(), torch.cat([part.dequantised() for part in parts]))
    assert_same(*both(torch.float32, randn(7, 128), parts))


def test_fp8_is_the_nearest_of_a_columns_own() -> None:
    values = randn(1500, 20) * torch.logspace(-6, 6, 1500).unsqueeze(1)
    values[7] = 0
    weight = quantise_fp8(values)
    error = (weight.dequantised() - values).abs()
    assert not weight.dequantised()[7].any()
    assert weight.codes.float().abs().amax(1)[8:].eq(448).all()
    # Three bits beside the first, or a multiple of 2^-9.
    assert (error <= torch.maximum(values.abs() / 16, weight.scales * 2**-10) * 1.001).all()
    with pytest.raises(ValueError, match="not finite"):
        quantise_fp8(torch.tensor([[1.0, torch.inf]]))


@pytest.mark.parametrize("ops", [CpuOps(torch.float32), TorchOps(torch.float32)], ids=["cpu", "torch"])
def test_parts_that_do_not_fit_are_named(ops: Ops) -> None:
    alike = r"parts of one layer must be alike, not int4 in 2 groups of 32 and int4 in 1 groups of 64"
    with pytest.raises(ValueError, match=alike):
        ops.linear_weight([weight_of(INT4, 8, 64, 32, False), weight_of(INT4, 8, 64, 64, False)])
    with pytest.raises(ValueError, match="1 parts of a layer are quantized, 2 are not"):
        ops.linear_weight([weight_of(INT4, 8, 64, 32, False), torch.zeros(8, 64), torch.zeros(8, 64)])
    with pytest.raises(ValueError, match="64 inputs in groups of 64: mxfp4 takes whole groups of 32"):
        weight_of(MXFP4, 8, 64, 64, False)
    with pytest.raises(ValueError, match="40 inputs in groups of 32: mxfp4 takes whole groups of 32"):
        weight_of(MXFP4, 8, 40, 32, False)
    with pytest.raises(ValueError, match=f"groups of 33 inputs: must be multiples of {BLOCK[INT4]}"):
        weight_of(INT4, 8, 64, 33, False)
    with pytest.raises(ValueError, match=r"scales must have shape \(8, 2\), not \(8, 1\)"):
        QuantisedWeight(INT4, torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 1), None, 32)
