from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from alignedserve.kernels.triton.layer_norm import layer_norm, layer_norm_reference
from alignedserve.kernels.triton.rms_norm import rms_norm, rms_norm_reference
from tests.kernels.triton.harness import DTYPES, apart, assert_close, poison, randn

WIDTHS = [1, 5, 64, 777, 5120]
sizes = pytest.mark.parametrize("width", WIDTHS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.mark.drawn(one_in=4)
@dtypes
@sizes
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_rms_norm(dtype: torch.dtype, width: int, rows: int) -> None:
    x, weight = apart(randn(rows, width, dtype=dtype) + 3), randn(width, dtype=dtype)
    out = poison(rows, width, dtype=dtype)
    assert rms_norm(x, weight, 1e-5, out) is out
    assert_close(out, rms_norm_reference(x, weight, 1e-5))


@pytest.mark.drawn(one_in=4)
@dtypes
@sizes
@pytest.mark.parametrize("in_place", [False, True])
def test_rms_norm_is_added(dtype: torch.dtype, width: int, in_place: bool) -> None:
    """Its weight may be in float32."""
    x, weight, residual = apart(randn(3, width, dtype=dtype)), randn(width), randn(3, width, dtype=dtype)
    expected = rms_norm_reference(x, weight, 1e-5, residual)
    out = residual if in_place else poison(3, width, dtype=dtype)
    assert rms_norm(x, weight, 1e-5, out, residual) is out
    assert_close(out, expected)


@pytest.mark.drawn(one_in=4)
@dtypes
@sizes
@pytest.mark.parametrize(("with_weight", "with_bias"), [(True, True), (True, False), (False, False)])
def test_layer_norm(dtype: torch.dtype, width: int, with_weight: bool, with_bias: bool) -> None:
    x = apart(randn(5, width, dtype=dtype) + 3)
    weight = randn(width, dtype=dtype) if with_weight else None
    bias = randn(width, dtype=dtype) if with_bias else None
    out = poison(5, width, dtype=dtype)
    assert layer_norm(x, weight, bias, 1e-5, out) is out
    assert_close(out, layer_norm_reference(x, weight, bias, 1e-5))


def test_layer_norm_of_nothing() -> None:
    assert layer_norm(randn(0, 8), None, None, 1e-5).shape == (0, 8)


@dtypes
def test_large_values_do_not_overflow(dtype: torch.dtype) -> None:
    x = (randn(2, 64) * 3000).to(dtype)
    assert_close(rms_norm(x, randn(64) * 0 + 1, 1e-5), rms_norm_reference(x, randn(64) * 0 + 1, 1e-5))
    assert_close(layer_norm(x, None, None, 1e-5), layer_norm_reference(x, None, None, 1e-5))


X = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("name", "call", "arguments"),
    [
        ("x", rms_norm, (torch.zeros(8), X[0], 1e-5)),
        ("x", rms_norm, (torch.zeros(1, 8193), torch.zeros(8193), 1e-5)),
        ("x", layer_norm, (X.t(), None, None, 1e-5)),
        ("weight", rms_norm, (X, torch.zeros(7), 1e-5)),
        ("weight", layer_norm, (X, X[0].int(), None, 1e-5)),
        ("bias", layer_norm, (X, None, torch.zeros(9), 1e-5)),
        ("out", rms_norm, (X, X[0], 1e-5, X.half())),
        ("residual", rms_norm, (X, X[0], 1e-5, None, X[:1])),
        ("out", layer_norm, (X, None, None, 1e-5, torch.zeros(2, 9)[:, :8])),
    ],
)
def test_wrong_arguments_are_named(name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        call(*arguments)
