"""RMS norm of rows, plus an optional residual.

Grid: (rows,), one program per row, which it holds in registers.
Shapes: x [rows, width], rows may be strided, width <= 8192; weight [width]; result and residual [rows, width].
dtypes: float32, float16, bfloat16 (the weight's may differ); arithmetic in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from alignedserve.kernels.triton.checks import check_like, check_row_width, check_rows, check_vector
from alignedserve.kernels.triton.row_tiles import row_warps


@triton.jit
def rms_norm_kernel(x, weight, residual, out, eps, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    exists = columns < WIDTH
    scale = tl.load(weight + columns, exists, other=0.0).to(tl.float32)
    values = tl.load(x + row * x_stride + columns, exists, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps)
    values *= scale
    if residual is not None:
        values += tl.load(residual + row * WIDTH + columns, exists, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, values.to(out.dtype.element_ty), exists)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `out`, which is allocated if not given. It may be the residual, or x if x is contiguous."""
    check_rows("x", x)
    check_row_width("x", x)
    check_vector("weight", weight, x.shape[1], x.device)
    if out is None:
        out = x.new_empty(x.shape)
    check_like("out", out, tuple(x.shape), x)
    if residual is not None:
        check_like("residual", residual, tuple(x.shape), x)
    rows, width = x.shape
    if rows:
        block = triton.next_power_of_2(width)
        rms_norm_kernel[(rows,)](
            x, weight, residual, out, eps, x.stride(0), WIDTH=width, BLOCK=block, num_warps=row_warps(block)
        )
    return out


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (normed if residual is None else normed + residual.float()).to(x.dtype)
