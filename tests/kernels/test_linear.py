from __future__ import annotations

import pytest
import torch

from alignedserve.ops.base import Activation, Linear, Ops
from alignedserve.ops.cpu_ops import CpuOps
from tests.kernels.harness import DTYPES, assert_close, evaluate, randn, reference


def weight_of(ops: Ops, widths: list[int], k: int, bias: bool, activation: Activation) -> Linear:
    parts = [randn(n, k, seed=i, dtype=torch.bfloat16) * k**-0.5 for i, n in enumerate(widths)]
    parts = [part.bfloat16().float() for part in parts]
    biases = [randn(n, seed=9 + i, dtype=torch.bfloat16) for i, n in enumerate(widths)]
    return ops.linear_weight(parts, biases if bias else None, activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7, 12, 13, 31, 250])
@pytest.mark.parametrize(("k", "widths"), [(8, [5]), (33, [32, 7, 7]), (96, [64, 96]), (770, [31])])
def test_odd_sizes(dtype: torch.dtype, rows: int, k: int, widths: list[int]) -> None:
    def operation(ops: Ops, x: object) -> object:
        return ops.linear(x, weight_of(ops, widths, k, True, Activation.NONE))

    ops = CpuOps(dtype)
    x = randn(rows, k, seed=3, dtype=torch.bfloat16)
    assert_close(evaluate(ops, x, lambda v: operation(ops, v)), reference(x, operation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("rows", [1, 9])
def test_activations(dtype: torch.dtype, bias: bool, activation: Activation, rows: int) -> None:
    widths = [41, 41] if activation.is_gated else [41]

    def operation(ops: Ops, x: object) -> object:
        return ops.linear(x, weight_of(ops, widths, 40, bias, activation))

    ops = CpuOps(dtype)
    # large values too: the exponentials inside must not overflow into NaN
    x = randn(rows, 40, seed=3, dtype=torch.bfloat16) * torch.tensor([1.0, 256.0] * 20)
    assert_close(evaluate(ops, x, lambda v: operation(ops, v)), reference(x, operation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_residual(dtype: torch.dtype, rows: int) -> None:
    def operation(ops: Ops, x: object) -> object:
        return ops.linear(x, weight_of(ops, [50], 50, False, Activation.NONE), residual=x)

    ops = CpuOps(dtype)
    x = randn(rows, 50, seed=3, dtype=torch.bfloat16)
    assert_close(evaluate(ops, x, lambda v: operation(ops, v)), reference(x, operation))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    x = randn(500, 70, dtype=torch.bfloat16)
    ops = CpuOps(dtype)
    weight = weight_of(ops, [200], 70, True, Activation.GELU_TANH)
    whole = evaluate(ops, x, lambda v: ops.linear(v, weight))
    for rows in (1, 2, 3, 4, 5, 6, 8, 11, 12, 13, 17, 23, 25, 100, 250):
        start = 7 * rows % 200
        part = evaluate(ops, x[start : start + rows], lambda v: ops.linear(v, weight))
        assert torch.equal(part, whole[start : start + rows]), rows


def test_wrong_arguments_are_named() -> None:
    ops = CpuOps(torch.float32)
    with pytest.raises(ValueError, match="parts"):
        ops.linear_weight([torch.zeros(3)])
    with pytest.raises(ValueError, match="parts"):
        ops.linear_weight([torch.zeros(3, 4), torch.zeros(3, 5)])
    with pytest.raises(ValueError, match="gate and up"):
        ops.linear_weight([torch.zeros(3, 4)], activation=Activation.SILU_GATED)
    with pytest.raises(ValueError, match="biases"):
        ops.linear_weight([torch.zeros(3, 4)], [torch.zeros(4)])
    with pytest.raises(ValueError, match="x must be 4 wide"):
        evaluate(ops, torch.zeros(1, 5), lambda v: ops.linear(v, ops.linear_weight([torch.zeros(3, 4)])))
    relu = ops.linear_weight([torch.zeros(4, 4)], activation=Activation.RELU)
    with pytest.raises(ValueError, match="not both"):
        evaluate(ops, torch.zeros(1, 4), lambda v: ops.linear(v, relu, residual=v))
    with pytest.raises(ValueError, match="dtype"):
        CpuOps(torch.float16)
