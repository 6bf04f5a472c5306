from __future__ import annotations

import pytest
import torch

from alignedserve.ops.base import Ops
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.step import StepInputs
from alignedserve.ops.torch_ops import TorchOps
from tests.kernels.harness import DTYPES, assert_close, evaluate, randn, reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 16, 64, 100, 777])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_rms_norm(dtype: torch.dtype, width: int, rows: int) -> None:
    weight = randn(width, seed=1, dtype=torch.bfloat16)

    def operation(ops: Ops, x: object) -> object:
        return ops.rms_norm(x, ops.parameter(weight), 1e-5)

    ops = CpuOps(dtype)
    x = randn(rows, width, dtype=torch.bfloat16) + 3
    assert_close(evaluate(ops, x, lambda v: operation(ops, v)), reference(x, operation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 64, 777])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_rms_norm_is_added_and_its_weight_may_be_in_float32(
    dtype: torch.dtype, width: int, rows: int
) -> None:
    # In bfloat16 these would all be one.
    weight = 1 + randn(width, seed=1) / 1000

    def operation(ops: Ops, x: object) -> object:
        return ops.rms_norm(x, ops.parameter(weight, torch.float32), 1e-5, residual=x)

    ops = CpuOps(dtype)
    x = (randn(rows, width) + 3).bfloat16().float()
    assert_close(evaluate(ops, x, lambda v: operation(ops, v)), reference(x, operation))


def test_a_weight_in_float32_is_not_rounded() -> None:
    """Rounded to bfloat16, these would be multiples of 2 ** -9, and so would the sums."""
    weight = torch.linspace(-1, -0.997, 64)
    ops = CpuOps(torch.bfloat16)
    found = evaluate(
        ops,
        torch.ones(1, 64),
        lambda x: ops.rms_norm(x, ops.parameter(weight, torch.float32), 1e-12, residual=x),
    )
    assert torch.allclose(found[0].float(), 1 + weight, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings_are_scaled(dtype: torch.dtype, is_tied: bool) -> None:
    step = StepInputs(20, 1, 1)
    step.commit(11, 0, 0)
    step.token_ids[:11] = torch.arange(11) * 7 % 40
    words = randn(40, 50, dtype=torch.bfloat16)

    def run(ops: Ops) -> torch.Tensor:
        table = ops.linear_weight([words]) if is_tied else ops.parameter(words)
        head = ops.linear_weight([torch.ones(1, 50)])
        model = ops.compile(
            lambda s: ops.embed(table, s.token_ids, scale=7.125), lambda x: ops.linear(x, head), step, 4
        )
        return model.forward().clone()

    expected = (words[torch.arange(11) * 7 % 40].to(dtype) * 7.125).tolist()
    assert run(CpuOps(dtype)).tolist() == run(TorchOps(dtype)).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 64, 777])
@pytest.mark.parametrize(("with_weight", "with_bias"), [(True, True), (True, False), (False, False)])
def test_layer_norm(dtype: torch.dtype, width: int, with_weight: bool, with_bias: bool) -> None:
    weight = randn(width, seed=1, dtype=torch.bfloat16)
    bias = randn(width, seed=2, dtype=torch.bfloat16)

    def operation(ops: Ops, x: object) -> object:
        return ops.layer_norm(
            x,
            ops.parameter(weight) if with_weight else None,
            ops.parameter(bias) if with_bias else None,
            1e-5,
        )

    ops = CpuOps(dtype)
    x = (randn(10, width) + 3).bfloat16().float()
    assert_close(evaluate(ops, x, lambda v: operation(ops, v)), reference(x, operation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 48])
@pytest.mark.parametrize("is_tied", [False, True])
def test_embed_adds_two_tables(dtype: torch.dtype, width: int, is_tied: bool) -> None:
    step = StepInputs(20, 1, 1)
    step.commit(11, 0, 0)
    step.token_ids[:11] = torch.arange(11) * 7 % 40
    step.positions[:11] = torch.arange(11)
    words, places = randn(40, width, dtype=torch.bfloat16), randn(13, width, seed=1, dtype=torch.bfloat16)

    def run(ops: Ops) -> torch.Tensor:
        tables = ops.linear_weight([words]) if is_tied else ops.parameter(words), ops.parameter(places)
        head = ops.linear_weight([torch.ones(1, width)])
        model = ops.compile(
            lambda s: ops.embed(tables[1], s.positions, offset=2, add_to=ops.embed(tables[0], s.token_ids)),
            lambda x: ops.linear(x, head),
            step,
            4,
        )
        return model.forward().clone()

    assert_close(run(CpuOps(dtype)), run(TorchOps(torch.float32)))


def test_operations_outside_compile_are_refused() -> None:
    ops = CpuOps(torch.float32)
    with pytest.raises(RuntimeError, match="compile"):
        ops.embed(torch.zeros(3, 4), StepInputs(1, 1, 1).token_ids)


def test_foreign_ids_and_dtypes_are_refused() -> None:
    ops = CpuOps(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"weight must be torch\.bfloat16 or torch\.float32, not torch\.float16"
    ):
        evaluate(ops, torch.zeros(1, 4), lambda x: ops.rms_norm(x, torch.ones(4).half(), 1e-5))
    with pytest.raises(ValueError, match="ids"):
        evaluate(
            ops,
            torch.zeros(1, 4),
            lambda x: ops.embed(ops.parameter(torch.zeros(3, 4)), torch.zeros(1, dtype=torch.int32)),
        )
