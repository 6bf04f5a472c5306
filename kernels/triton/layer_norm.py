"""Layer norm of rows.

Grid: (rows,), one program per row, which it holds in registers.
Shapes: x [rows, width], rows may be strided, width <= 8192; weight, bias [width] or None; result [rows, width].
dtypes: float32, float16, bfloat16 (the parameters' may differ); arithmetic in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from alignedserve.kernels.triton.checks import check_like, check_row_width, check_rows, check_vector
from alignedserve.kernels.triton.launch import dependent_launch, start_dependents, wait_for_dependency
from alignedserve.kernels.triton.row_tiles import row_warps


@triton.jit
def layer_norm_kernel(
    x,
    weight,
    bias,
    out,
    eps,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    exists = columns < WIDTH
    wait_for_dependency(PDL)
    start_dependents(PDL)
    values = tl.load(x + row * x_stride + columns, exists, other=0.0).to(tl.float32)
    values = tl.where(exists, values - tl.sum(values, axis=0) / WIDTH, 0.0)
    values *= tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps)
    if weight is not None:
        values *= tl.load(weight + columns, exists, other=0.0).to(tl.float32)
    if bias is not None:
        values += tl.load(bias + columns, exists, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, values.to(out.dtype.element_ty), exists)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `out`, which is allocated if not given. It may be x, if x is contiguous."""
    check_rows("x", x)
    check_row_width("x", x)
    rows, width = x.shape
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            check_vector(name, parameter, width, x.device)
    if out is None:
        out = x.new_empty(x.shape)
    check_like("out", out, (rows, width), x)
    if rows == 0:
        return out
    block = triton.next_power_of_2(width)
    layer_norm_kernel[(rows,)](
        x,
        weight,
        bias,
        out,
        eps,
        x.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=row_warps(block),
        **dependent_launch(),
    )
    return out


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    wide_weight, wide_bias = (None if p is None else p.float() for p in (weight, bias))
    return F.layer_norm(x.float(), x.shape[-1:], wide_weight, wide_bias, eps).to(x.dtype)
