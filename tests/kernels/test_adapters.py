"""Rows with an adapter get the merged weight's results, and rows without one the results without adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from alignedserve.ops.adapters import Delta, LayerAdapters
from alignedserve.ops.base import Activation, Linear, Ops
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.torch_ops import TorchOps
from tests.kernels.harness import DTYPES, TOLERANCE, evaluate, randn

NUM_IN = 70
# Of each adapter.
RANKS, SCALES = (3, 16, 40), (2.0, 0.3, -1.0)
BACKENDS: dict[str, Callable[..., Ops]] = {"torch": TorchOps, "cpu": CpuOps}
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def bf16(*size: int, seed: int) -> torch.Tensor:
    """Values that every dtype holds."""
    values: torch.Tensor = randn(*size, seed=seed) * size[-1] ** -0.5
    return values.bfloat16().float()


def deltas_of(widths: Sequence[int]) -> list[list[Delta | None]]:
    """The second adapter adds nothing to the last part of several."""
    found: list[list[Delta | None]] = [
        [
            Delta(bf16(rank, NUM_IN, seed=10 * number + part), bf16(width, rank, seed=7 * number + part))
            for part, width in enumerate(widths)
        ]
        for number, rank in enumerate(RANKS)
    ]
    if len(widths) > 1:
        found[1][-1] = None
    return found


def parts_of(widths: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    parts = [bf16(width, NUM_IN, seed=part) for part, width in enumerate(widths)]
    return parts, [bf16(width, seed=50 + part) for part, width in enumerate(widths)]


def adapted(ops: Ops, widths: Sequence[int], activation: Activation) -> Linear:
    adapters = LayerAdapters(NUM_IN, tuple(widths), deltas_of(widths), SCALES)
    return ops.with_adapters(ops.linear_weight(*parts_of(widths), activation), adapters)


def merged(x: torch.Tensor, numbers: Sequence[int], widths: Sequence[int], act: Activation) -> torch.Tensor:
    """Each row with the weight of its adapter, in float32."""
    rows, (parts, biases) = [], parts_of(widths)
    for row, number in zip(x, numbers, strict=True):
        weights = [part.clone() for part in parts]
        for weight, delta in zip(weights, deltas_of(widths)[number - 1] if number else (), strict=False):
            if delta is not None:
                weight += SCALES[number - 1] * delta.b @ delta.a
        ops = TorchOps(torch.float32)
        layer = ops.linear_weight(weights, biases, act)
        rows.append(evaluate(ops, row.unsqueeze(0), lambda v, ops=ops, layer=layer: ops.linear(v, layer)))  # type: ignore[misc]
    return torch.cat(rows)


LAYERS = [
    ([41], Activation.NONE),
    ([32, 7, 7], Activation.NONE),
    ([64, 16, 16], Activation.NONE),
    ([5, 3, 9, 2], Activation.NONE),
    ([41], Activation.RELU),
    ([41], Activation.GELU),
    ([33], Activation.GELU_TANH),
    ([41, 41], Activation.SILU_GATED),
    ([48, 48], Activation.SILU_GATED),
]


@pytest.mark.drawn(one_in=3)
@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 13, 60])
@pytest.mark.parametrize(("widths", "activation"), LAYERS)
def test_rows_get_what_merged_weights_yield(
    backend: str, dtype: torch.dtype, rows: int, widths: list[int], activation: Activation
) -> None:
    ops, x = BACKENDS[backend](dtype), bf16(rows, NUM_IN, seed=3) * 8
    numbers = [(row // 3 + row % 2) % 4 for row in range(rows)]
    layer = adapted(ops, widths, activation)
    found = evaluate(ops, x, lambda v: ops.linear(v, layer), numbers)
    # Sums of several roundings, where torch has no more than the dtype.
    tolerance = 4 * TOLERANCE[dtype]
    assert_close_to(found, merged(x, numbers, widths, activation), tolerance)


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_comes_on_top(backend: str, dtype: torch.dtype) -> None:
    ops, x, numbers = BACKENDS[backend](dtype), bf16(9, NUM_IN, seed=3), [0, 1, 1, 2, 3, 3, 0, 2, 1]
    layer = adapted(ops, [NUM_IN], Activation.NONE)
    found = evaluate(ops, x, lambda v: ops.linear(v, layer, residual=v), numbers)
    expected = x + merged(x, numbers, [NUM_IN], Activation.NONE)
    assert_close_to(found, expected, 4 * TOLERANCE[dtype])


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("widths", "activation"), LAYERS)
def test_rows_without_one_are_as_without_adapters(
    backend: str, dtype: torch.dtype, widths: list[int], activation: Activation
) -> None:
    ops, x = BACKENDS[backend](dtype), bf16(20, NUM_IN, seed=3)
    plain = ops.linear_weight(*parts_of(widths), activation)
    layer = adapted(ops, widths, activation)
    expected = evaluate(ops, x, lambda v: ops.linear(v, plain))
    numbers = [0, 0, 1, 0, 2, 3, 0, 0, 0, 3] * 2
    for asked in (None, [0] * 20, numbers):
        found = evaluate(ops, x, lambda v: ops.linear(v, layer), asked)
        is_plain = torch.tensor([number == 0 for number in asked or [0] * 20])
        assert torch.equal(found[is_plain], expected[is_plain])
        assert is_plain.all() or (found != expected)[~is_plain].any(dim=1).all()


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("widths", "activation"), LAYERS)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    dtype: torch.dtype, widths: list[int], activation: Activation, quantization: str | None
) -> None:
    ops, x = CpuOps(dtype, quantization=quantization), bf16(300, NUM_IN, seed=3)
    layer = adapted(ops, widths, activation)
    numbers = (torch.arange(300) // 7 % 4).tolist()
    together = evaluate(ops, x, lambda v: ops.linear(v, layer), numbers)
    for start, end in ((0, 1), (7, 8), (8, 11), (10, 23), (50, 131), (299, 300)):
        alone = evaluate(ops, x[start:end], lambda v: ops.linear(v, layer), numbers[start:end])
        assert torch.equal(alone, together[start:end])


@each_backend
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_is_added_to_weights_in_fewer_bits_has_all_of_its_own(backend: str, quantization: str) -> None:
    ops, x = BACKENDS[backend](torch.float32, quantization=quantization), bf16(20, NUM_IN, seed=3)
    widths, numbers = [64, 16, 16], [1, 2, 3, 0] * 5
    layer = adapted(ops, widths, Activation.NONE)
    found = evaluate(ops, x, lambda v: ops.linear(v, layer), numbers)
    without = evaluate(ops, x, lambda v: ops.linear(v, layer))
    merged_, plain = (merged(x, each, widths, Activation.NONE) for each in (numbers, [0] * 20))
    assert_close_to(found - without, merged_ - plain, 1e-5)


def test_what_others_adapters_make_of_a_row_may_be_infinite() -> None:
    ops, x = TorchOps(torch.float32), bf16(2, NUM_IN, seed=3)
    huge = Delta(torch.full((1, NUM_IN), 3e38), torch.ones(4, 1))
    small = Delta(torch.ones(1, NUM_IN), torch.ones(4, 1))
    plain = ops.linear_weight([torch.ones(4, NUM_IN)])
    layer = ops.with_adapters(plain, LayerAdapters(NUM_IN, (4,), [[huge], [small]], (1.0, 1.0)))
    found = evaluate(ops, x.abs(), lambda v: ops.linear(v, layer), [0, 2])
    assert torch.equal(found[0], evaluate(ops, x.abs(), lambda v: ops.linear(v, plain))[0])
    assert found.isfinite().all()


def assert_close_to(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    error = (actual.float() - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"
