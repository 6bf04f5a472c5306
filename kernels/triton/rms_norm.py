"""RMS norm of rows, and the same of the sum of a row and a residual.

Grid: (rows,), one program per row, which it holds in registers.
Shapes: x, residual [rows, width], rows may lie apart, width <= 8192; weight [width]; results [rows, width].
dtypes: float32, float16, bfloat16 (the weight's may differ); arithmetic in float32. The sum is rounded to the dtype
before it is normed, as it is where an addition comes before a norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.checks import check_like, check_row_width, check_rows, check_vector
from kernels.triton.row_tiles import row_warps


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    summed_out,
    eps,
    x_stride,
    residual_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    exists = columns < WIDTH
    scale = tl.load(weight + columns, exists, other=0.0).to(tl.float32)
    values = tl.load(x + row * x_stride + columns, exists, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + row * residual_stride + columns, exists, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)
        tl.store(summed_out + row * WIDTH + columns, rounded, exists)
        values = rounded.to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps)
    tl.store(out + row * WIDTH + columns, (values * scale).to(out.dtype.element_ty), exists)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns `out`, made if not given; it may be x, if x is contiguous."""
    _check(x, weight)
    out = _result("out", out, x)
    _launch(x, None, weight, eps, out, None)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    summed_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual); the results, made if not given, may be x and residual themselves."""
    _check(x, weight)
    check_rows("residual", residual)
    if residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
        raise ValueError(
            f"residual must be like x, {tuple(x.shape)} of {x.dtype}, not {tuple(residual.shape)}"
        )
    out, summed_out = _result("out", out, x), _result("summed_out", summed_out, x)
    _launch(x, residual, weight, eps, out, summed_out)
    return out, summed_out


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    check_rows("x", x)
    check_row_width("x", x)
    check_vector("weight", weight, x.shape[1], x.device)


def _result(name: str, out: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    if out is None:
        return x.new_empty(x.shape)
    check_like(name, out, tuple(x.shape), x)
    return out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    summed_out: torch.Tensor | None,
) -> None:
    rows, width = x.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        summed_out,
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=row_warps(block),
    )


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    summed = x + residual
    return rms_norm_reference(summed, weight, eps), summed
