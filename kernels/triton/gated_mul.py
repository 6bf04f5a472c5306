"""silu(gate) * up, or gelu(gate) * up, of rows with the gate's columns and then those of up. Gelu is its tanh form.

Grid: (tokens, pieces of BLOCK columns).
Shapes: x [tokens, 2 * inner], rows may be strided; result [tokens, inner].
dtypes: float32, float16, bfloat16; arithmetic in float32, rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from alignedserve.kernels.triton.checks import check_like, check_rows

# Four warps of threads with eight columns each: 16 bytes of half precision from the gate, and 16 from up.
BLOCK = 1024


@triton.jit
def gated_mul_kernel(x, out, x_stride, INNER: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < INNER
    x += row * x_stride
    gate = tl.load(x + columns, exists, other=0.0).to(tl.float32)
    up = tl.load(x + INNER + columns, exists, other=0.0).to(tl.float32)
    inside = gate
    if GELU:
        # x / 2 * (1 + tanh z) = x / (1 + exp(-2 z))
        inside = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    result = gate / (1.0 + tl.exp(-inside)) * up
    tl.store(out + row * INNER + columns, result.to(out.dtype.element_ty), exists)


def gated_mul(x: torch.Tensor, gelu: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns `out`, which is allocated if not given."""
    check_rows("x", x)
    rows, width = x.shape
    if width % 2:
        raise ValueError(f"x must have an even width, not {width}")
    inner = width // 2
    if out is None:
        out = x.new_empty(rows, inner)
    check_like("out", out, (rows, inner), x)
    if rows:
        grid = (rows, triton.cdiv(inner, BLOCK))
        gated_mul_kernel[grid](
            x,
            out,
            x.stride(0),
            INNER=inner,
            BLOCK=BLOCK,
            GELU=gelu,
            num_warps=4,
        )
    return out


def gated_mul_reference(x: torch.Tensor, gelu: bool = False) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return ((F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up).to(x.dtype)
