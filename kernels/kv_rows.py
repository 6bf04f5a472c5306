"""8-bit KV in an instance's own cache (`kv_cache_dtype`): the formats' arithmetic in plain torch.

The cache is [block, layer, k|v, kv_head, slot, row]. A row is one head's K or V of one token, and the cache's dtype
determines its contents:

    float32, bfloat16, float16   its head_dim values
    float8_e4m3fn                the same, each rounded to e4m3 (`fp8`)
    int8                         head_dim codes from -127 to 127, then their scale in float32 (`int8`)

A row is written once, from values in the model's dtype, and depends on nothing else: not on the batch, not on the
chunks of a prompt, not on other rows of its block. Blocks and slots are therefore moved as plain bytes.

- fp8: values beyond 448 become 448. NaN and infinity are restored as NaN.
- int8: the scale is the largest magnitude of the row / 127. An error is at most half the scale. A row with all values
  below 2^-100 is restored as zeros; one with a NaN or an infinity is restored as NaN as a whole.
"""

from __future__ import annotations

import torch

FP8, INT8 = torch.float8_e4m3fn, torch.int8
SCALE_BYTES = 4
MAX_CODE = 127
MAX_FP8 = 448.0
# Below this, MAX_CODE divided by it might exceed float32.
LEAST_MAGNITUDE = 2.0**-100


def is_coded(cache: torch.Tensor) -> bool:
    """Whether rows hold 8 bits per value."""
    return cache.dtype in (FP8, INT8)


def head_dim_of(cache: torch.Tensor) -> int:
    return cache.shape[-1] - (SCALE_BYTES if cache.dtype == INT8 else 0)


def to_rows(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the rows [..., row] of a cache of this dtype for values [..., head_dim]."""
    if dtype == FP8:
        return torch.where(values.isfinite(), values.float().clamp(-MAX_FP8, MAX_FP8), torch.nan).to(FP8)
    return _to_int8(values.float()) if dtype == INT8 else values.to(dtype)


def from_rows(rows: torch.Tensor) -> torch.Tensor:
    """Returns the values [..., head_dim] of rows [..., row]; in float32 if they are in 8 bits."""
    if rows.dtype == FP8:
        return rows.float()
    if rows.dtype == INT8:
        return rows[..., :-SCALE_BYTES].float() * scales_of(rows)
    return rows


def scales_of(rows: torch.Tensor) -> torch.Tensor:
    """Returns the scales [..., 1] of int8 rows."""
    # The copy is aligned, wherever a row ends.
    return rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)


def as_movable(cache: torch.Tensor) -> torch.Tensor:
    """Returns a view that torch can copy single rows of. It can't for e4m3."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def _to_int8(x: torch.Tensor) -> torch.Tensor:
    largest = x.abs().amax(-1, keepdim=True)
    is_finite, is_zero = largest.isfinite(), largest < LEAST_MAGNITUDE
    # torch rounds twice when it divides a Python number by a tensor.
    codes = (x * (torch.full_like(largest, MAX_CODE) / largest)).round()
    codes = torch.where(is_finite & ~is_zero, codes, 0.0).to(torch.int8)
    scale = torch.where(
        is_finite, torch.where(is_zero, 0.0, largest / torch.full_like(largest, MAX_CODE)), torch.nan
    )
    return torch.cat([codes, scale.contiguous().view(torch.int8)], -1)
