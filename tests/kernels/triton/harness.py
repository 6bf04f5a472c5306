"""Where Triton's kernels are tested: on the GPU if there is one, else in Triton's interpreter (tests/conftest.py)."""

from __future__ import annotations

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The interpreter cuts a float32 off to bfloat16 where a GPU rounds: twice the error at each rounding.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2 if DEVICE == "cuda" else 2e-2}


def randn(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size).to(DEVICE, dtype)


def poison(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a kernel must overwrite."""
    return torch.full(size, float("nan"), dtype=dtype, device=DEVICE)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def apart(x: torch.Tensor, gap: int = 16) -> torch.Tensor:
    """The same rows, with NaN between them."""
    wide = poison(x.shape[0], x.shape[1] + gap, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Each element within the dtype's tolerance of itself or, for what is near zero, of one."""
    assert actual.shape == expected.shape
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=False
    )
