from __future__ import annotations

import pytest
import torch

from alignedserve.kernels.triton.silu_mul import BLOCK, silu_mul, silu_mul_reference
from tests.kernels.triton.harness import DEVICE, DTYPES, apart, assert_close, poison, randn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 7, 64, BLOCK - 1, 2 * BLOCK + 3])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_silu_mul(dtype: torch.dtype, inner: int, rows: int) -> None:
    x = apart(randn(rows, 2 * inner, dtype=dtype) * 3)
    out = poison(rows, inner, dtype=dtype)
    assert silu_mul(x, out) is out
    assert_close(out, silu_mul_reference(x))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_far_from_zero() -> None:
    x = torch.tensor([[-1e4, -120.0, 0.0, 120.0, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    assert silu_mul(x).tolist() == [[0.0, 0.0, 0.0, 240.0]]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="^x must"):
        silu_mul(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="^x must"):
        silu_mul(torch.zeros(8))
    with pytest.raises(ValueError, match="^out must"):
        silu_mul(torch.zeros(2, 8), torch.zeros(2, 8))
