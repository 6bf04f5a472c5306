from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.triton.harness import DEVICE

pytest.importorskip("triton")

from alignedserve.kernels.triton import gemv as module
from alignedserve.kernels.triton.gemv import GemvTuning, gemv, gemv_torch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
TUNINGS = [GemvTuning(4, 64, 4, 2), GemvTuning(2, 256, 4, 3), GemvTuning(16, 128, 4, 1)]


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.drawn(one_in=4)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize("num_in", [64, 200, 384])
def test_everything_around_it(dtype: torch.dtype, tuning: GemvTuning, num_in: int) -> None:
    num_out = 37
    x, weight = randn(num_in, dtype=dtype), randn(num_out, num_in, dtype=dtype)
    extras: dict[str, Any] = dict(
        bias=randn(num_out, dtype=dtype),
        residual=randn(num_out, dtype=dtype),
        norm=randn(num_in, dtype=dtype),
        norm_eps=1e-5,
    )
    out = torch.full((num_out,), float("nan"), dtype=dtype, device=DEVICE)
    gemv(x, weight, out, tuning, **extras)
    check(out, gemv_torch(x, weight, **extras))


@pytest.mark.parametrize("activation", range(1, 6))
@pytest.mark.parametrize("has_norm", [False, True])
def test_activations(activation: int, has_norm: bool) -> None:
    num_in, num_out = 160, 26
    x = randn(1, num_in, dtype=torch.float32)
    weight = randn(num_out * (1 + (activation >= module.SILU_GATED)), num_in, dtype=torch.float32)
    norm = randn(num_in, dtype=torch.float32) if has_norm else None
    out = torch.full((1, num_out), float("nan"), device=DEVICE)
    gemv(x, weight, out, TUNINGS[0], norm=norm, norm_eps=1e-6, activation=activation)
    check(out[0], gemv_torch(x[0], weight, norm=norm, norm_eps=1e-6, activation=activation))


def test_the_residual_may_be_the_result() -> None:
    x, weight = randn(96, dtype=torch.float32), randn(40, 96, dtype=torch.float32)
    stream = randn(40, dtype=torch.float32)
    expected = gemv_torch(x, weight, residual=stream)
    gemv(x, weight, stream, TUNINGS[0], residual=stream)
    check(stream, expected)


def test_wrong_shapes_are_named() -> None:
    x, weight = randn(8, dtype=torch.float32), randn(4, 9, dtype=torch.float32)
    with pytest.raises(ValueError, match="weight must be"):
        gemv(x, weight, x, TUNINGS[0])
    with pytest.raises(ValueError, match="out must hold 4"):
        gemv(randn(9, dtype=torch.float32), weight, x, TUNINGS[0])


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert (out.double() - expected).norm() / expected.norm() < TOLERANCE[out.dtype]
