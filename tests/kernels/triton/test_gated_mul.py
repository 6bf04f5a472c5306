from __future__ import annotations

import pytest
import torch

from alignedserve.kernels.triton.gated_mul import BLOCK, gated_mul, gated_mul_reference
from tests.kernels.triton.harness import DEVICE, DTYPES, apart, assert_close, poison, randn


@pytest.mark.drawn(one_in=7)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 7, 64, BLOCK - 1, 2 * BLOCK + 3])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_gated_mul(dtype: torch.dtype, inner: int, rows: int, gelu: bool) -> None:
    x = apart(randn(rows, 2 * inner, dtype=dtype) * 3)
    out = poison(rows, inner, dtype=dtype)
    assert gated_mul(x, gelu, out) is out
    assert_close(out, gated_mul_reference(x, gelu))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("gelu", [False, True])
def test_far_from_zero(gelu: bool) -> None:
    x = torch.tensor([[-1e4, -120.0, 0.0, 120.0, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    assert gated_mul(x, gelu).tolist() == [[0.0, 0.0, 0.0, 240.0]]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="^x must"):
        gated_mul(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="^x must"):
        gated_mul(torch.zeros(8))
    with pytest.raises(ValueError, match="^out must"):
        gated_mul(torch.zeros(2, 8), out=torch.zeros(2, 8))
