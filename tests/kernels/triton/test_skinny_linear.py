from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.triton.harness import DEVICE, assert_close, randn

pytest.importorskip("triton")

from alignedserve.kernels.triton.gemv import gemv_torch
from alignedserve.kernels.triton.skinny_linear import SkinnyScratch, SkinnyTuning, skinny_linear

# The interpreter multiplies matrices of bfloat16 as if they were integers.
DTYPES = [torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
TUNING = SkinnyTuning(outputs=64, inner=64, num_warps=4, num_stages=3)


@pytest.mark.drawn(one_in=4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [2, 16, 33])
@pytest.mark.parametrize("num_programs", [1, 3, 7, 40])
def test_however_it_is_cut(dtype: torch.dtype, rows: int, num_programs: int) -> None:
    num_in, num_out = 320, 200
    x, weight = randn(rows, num_in, dtype=dtype), randn(num_out, num_in, dtype=dtype) * 0.1
    bias, residual = randn(num_out, dtype=dtype), randn(rows, num_out, dtype=dtype)
    expected = reference(x, weight, bias=bias, residual=residual)
    scratch = SkinnyScratch(num_programs, torch.device(DEVICE))
    # the residual may be the result, and nothing is left over from the first time
    for stream in (residual.clone(), residual.clone()):
        skinny_linear(x, weight, stream, TUNING, bias=bias, residual=stream, scratch=scratch)
        assert_close(stream, expected)
    assert not scratch.num_done.any()


def test_no_rows_yield_none() -> None:
    x, weight, out = (randn(*size, dtype=torch.float16) for size in ((0, 64), (32, 64), (0, 32)))
    assert skinny_linear(x, weight, out, TUNING) is out


def test_wrong_shapes_are_named() -> None:
    x, weight = randn(4, 64, dtype=torch.float16), randn(32, 72, dtype=torch.float16)
    with pytest.raises(ValueError, match="weight must be"):
        skinny_linear(x, weight, x, TUNING)
    with pytest.raises(ValueError, match="too many"):
        many, weight = randn(65, 64, dtype=torch.float16), randn(32, 64, dtype=torch.float16)
        skinny_linear(many, weight, randn(65, 32, dtype=torch.float16), TUNING)
    x, weight = randn(4, 64, dtype=torch.float16), randn(32, 72, dtype=torch.float16)
    with pytest.raises(ValueError, match="out must be"):
        skinny_linear(x, weight[:, :64].contiguous(), x, TUNING)


def reference(x: torch.Tensor, weight: torch.Tensor, **extras: Any) -> torch.Tensor:
    residual = extras.pop("residual", None)
    rows = [
        gemv_torch(row, weight, residual=None if residual is None else residual[index], **extras)
        for index, row in enumerate(x)
    ]
    return torch.stack(rows).to(x.dtype)
