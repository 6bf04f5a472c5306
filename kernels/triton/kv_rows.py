"""8-bit rows of the cache, as kernels read and write them: the formats of `kernels/kv_rows.py`.

A kernel gets the cache as codes: uint8 for e4m3, int8 for rows with a scale, else the values themselves. For rows with
a scale it also gets `scales`, the same memory as float32. A row's scale is HEAD_DIM bytes after the start of the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from alignedserve.kernels.kv_rows import INT8, as_movable


def codes_of(cache: torch.Tensor) -> torch.Tensor:
    return as_movable(cache)


def scales_of(cache: torch.Tensor) -> torch.Tensor | None:
    return cache.view(torch.float32) if cache.dtype == INT8 else None


@triton.jit
def numbers(codes, dtype: tl.constexpr):
    """Returns codes as numbers, not yet multiplied by their row's scale; values stay as they are."""
    if codes.dtype == tl.uint8:
        return codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        return codes.to(dtype)


@triton.jit
def load_scales(scales, row, HEAD_DIM: tl.constexpr, mask):
    """`row`: the start of rows, in bytes. The scale of a masked row is 0."""
    return tl.load(scales + (row + HEAD_DIM) // 4, mask, other=0.0)


@triton.jit
def quantise_heads(low, high):
    """Returns the codes of both halves of some heads, [heads, half] float32, and the heads' scales."""
    largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
    # x - x is not 0 for NaN and infinities.
    num_bad = tl.sum((low - low != 0.0).to(tl.int32) + (high - high != 0.0).to(tl.int32), 1)
    # 2^-100: see LEAST_MAGNITUDE.
    is_wide = (largest >= 7.888609052210118e-31) & (num_bad == 0)
    divisor = tl.where(is_wide, largest, 1.0)
    most = tl.full(largest.shape, 127.0, tl.float32)
    factor = tl.where(is_wide, tl.div_rn(most, divisor), 0.0)[:, None]
    scale = tl.where(is_wide, tl.div_rn(divisor, most), 0.0)
    scale = tl.where(num_bad > 0, float("nan"), scale)
    return _rounded(low * factor, is_wide), _rounded(high * factor, is_wide), scale


@triton.jit
def _rounded(x, is_wide):
    # Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the low bits of the mantissa.
    bits = (x + 12582912.0).to(tl.int32, bitcast=True)
    return tl.where(is_wide[:, None], bits, 0).to(tl.int8)


@triton.jit
def to_fp8(x):
    """Returns e4m3 as bytes. Values beyond 448 become 448, and values that are not finite become NaN."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # Keep three bits of the mantissa, rounded to nearest, ties to even. The exponent's bias is 7 instead of 127.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6, e4m3 has the multiples of 2^-9: adding 1.5 * 2^14 leaves the nearest in the low bits of the mantissa.
    subnormal = (size + 24576.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(size < 0.015625, subnormal, normal)
    code = code | (x.to(tl.int32, bitcast=True) >> 24 & 0x80)
    return tl.where(x - x == 0.0, code, 0x7F).to(tl.uint8)
