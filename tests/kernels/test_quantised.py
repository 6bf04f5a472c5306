"""Linear layers in 8 and 4 bits: the native kernel computes the same as the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from alignedserve.kernels.int4 import GROUP, ZERO, quantise_groups, quantise_int4
from alignedserve.kernels.int8 import LARGEST, MAX_IN_FEATURES, linear_int8, quantise_columns
from alignedserve.kernels.quantised import linear_quantised
from alignedserve.ops.base import Activation, Linear, Ops
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.quantise import FP8, INT4, INT8, QUANTISERS
from alignedserve.ops.torch_ops import TorchOps
from tests.kernels.harness import DTYPES, TOLERANCE, evaluate, randn

ROOT = Path(__file__).parents[2]
SCHEMES = (INT8, INT4)


def layer(ops: Ops, widths: list[int], k: int, activation: Activation = Activation.NONE) -> Linear:
    parts = [
        randn(n, k, seed=i) * k**-0.5 * torch.logspace(-3, 1, n).unsqueeze(1) for i, n in enumerate(widths)
    ]
    biases = [randn(n, seed=9 + i, dtype=torch.bfloat16) for i, n in enumerate(widths)]
    return ops.linear_weight(parts, biases, activation)


def both(
    scheme: str,
    dtype: torch.dtype,
    x: torch.Tensor,
    widths: list[int],
    activation: Activation = Activation.NONE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the native kernel and the reference make of it."""
    found = []
    for ops in (CpuOps(dtype, quantization=scheme), TorchOps(dtype, quantization=scheme)):
        weight = layer(ops, widths, x.shape[1], activation)
        found.append(evaluate(ops, x, lambda v, ops=ops, weight=weight: ops.linear(v, weight)))  # type: ignore[misc]
    return found[0], found[1]


@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7, 12, 13, 31, 250])
@pytest.mark.parametrize(
    ("k", "widths"), [(8, [5]), (33, [32, 7, 7]), (96, [64, 160]), (770, [31]), (1, [1])]
)
def test_odd_sizes(scheme: str, dtype: torch.dtype, rows: int, k: int, widths: list[int]) -> None:
    x = randn(rows, k, seed=3, dtype=torch.bfloat16) * torch.logspace(-4, 4, max(rows, 1))[:rows].unsqueeze(1)
    native, expected = both(scheme, dtype, x.bfloat16().float(), widths)
    assert torch.equal(native, expected)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(Activation))
def test_activations(scheme: str, dtype: torch.dtype, activation: Activation) -> None:
    widths = [41, 41] if activation.is_gated else [41]
    native, expected = both(scheme, dtype, randn(9, 40, seed=3, dtype=torch.bfloat16), widths, activation)
    error = (native.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("scheme", QUANTISERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_that_of_so_many_bits(scheme: str, dtype: torch.dtype) -> None:
    x = randn(40, 512, seed=3, dtype=torch.bfloat16)
    native, _ = both(scheme, dtype, x, [96])
    plain = TorchOps(torch.float32)
    weight = layer(plain, [96], 512)
    exact = evaluate(plain, x, lambda v: plain.linear(v, weight))
    error = (native.float() - exact).norm() / exact.norm()
    assert 1e-4 < error < {INT8: 0.02, INT4: 0.12, FP8: 0.03}[scheme]


def test_largest_values_are_summed_without_an_error() -> None:
    """All codes are 127 or -127: no sum of a pair, or of all, is too large for what it is held in."""
    k = 4099
    weight = torch.full((64, k), 3.0)
    weight[1::2] *= -1
    x = torch.full((13, k), 2.0)
    expected = {
        INT8: linear_int8(x, *quantise_columns(weight), None),
        INT4: linear_quantised(x, quantise_int4(weight), None),
    }
    for scheme in SCHEMES:
        ops = CpuOps(torch.float32, quantization=scheme)
        packed = ops.linear_weight([weight])
        native = evaluate(ops, x, lambda v, ops=ops, packed=packed: ops.linear(v, packed))  # type: ignore[misc]
        assert torch.equal(native, expected[scheme])
        assert torch.allclose(native[0, :2], torch.tensor([6.0 * k, -6.0 * k]), rtol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(scheme: str, dtype: torch.dtype) -> None:
    x = randn(500, 70, dtype=torch.bfloat16)
    ops = CpuOps(dtype, quantization=scheme)
    weight = layer(ops, [200], 70, Activation.GELU_TANH)
    whole = evaluate(ops, x, lambda v: ops.linear(v, weight))
    for rows in (1, 2, 3, 4, 5, 12, 13, 25, 100, 250):
        start = 7 * rows % 200
        part = evaluate(ops, x[start : start + rows], lambda v: ops.linear(v, weight))
        assert torch.equal(part, whole[start : start + rows]), rows


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_zeros_is_zero_and_what_is_not_finite_stays_so(scheme: str, dtype: torch.dtype) -> None:
    x = torch.ones(6, 40)
    x[0], x[1, 3], x[2, 39], x[3, 0] = 0, torch.nan, torch.inf, -torch.inf
    for ops in (CpuOps(dtype, quantization=scheme), TorchOps(dtype, quantization=scheme)):
        weight = ops.linear_weight([torch.eye(40)])
        out = evaluate(ops, x, lambda v, ops=ops, weight=weight: ops.linear(v, weight))  # type: ignore[misc]
        assert not out[0].any() and out[4:].isfinite().all()
        assert not out[1:4].isfinite().any(1).any() or not out[1:4].isfinite().all(1).any()


def test_codes_are_the_nearest_of_a_columns_own() -> None:
    weight = randn(1500, 20) * torch.logspace(-6, 6, 1500).unsqueeze(1)
    weight[7] = 0
    codes, scales = quantise_columns(weight)
    assert codes.dtype == torch.int8 and codes.abs().max() == LARGEST and not codes[7].any()
    assert ((codes * scales.unsqueeze(1) - weight).abs() <= scales.unsqueeze(1) * 0.5001).all()


def test_four_bits_are_the_nearest_of_their_groups_own() -> None:
    weight = randn(1500, 70) * torch.logspace(-6, 6, 1500).unsqueeze(1)
    weight[7] = 0
    codes, scales = quantise_groups(weight)
    assert codes.shape == (1500, 3, GROUP) and codes.min() == 0 and codes.max() == 15
    back = ((codes.float() - ZERO) * scales.float().unsqueeze(2)).flatten(1)
    assert not back[7].any() and not back[:, 70:].any()
    # The greatest of the other sign may be a code further than there is.
    steps = (
        (back[:, :70] - weight).abs() / scales.float().abs().repeat_interleave(GROUP, 1)[:, :70]
    ).nan_to_num()
    assert steps.max() < 1.05 and (steps <= 0.51).float().mean() > 0.97


def test_what_has_no_eight_bits_is_named() -> None:
    with pytest.raises(ValueError, match="65537 inputs"):
        quantise_columns(torch.zeros(1, MAX_IN_FEATURES + 1))
    with pytest.raises(ValueError, match="not finite"):
        quantise_columns(torch.tensor([[1.0, torch.nan]]))
    with pytest.raises(ValueError, match="not finite"):
        quantise_columns(torch.tensor([[1.0, torch.inf]]))
    with pytest.raises(ValueError, match="not finite"):
        quantise_groups(torch.tensor([[1.0, torch.inf]]))
