"""KV blocks to and from the pool's int8 format, between the paged cache and a buffer of blocks in the pool's form.

Grid: (blocks, groups, column tiles). A group is a head of a layer's k or v. A program has all slots of one block's
group, for COLUMNS of its head_dim.
Shapes: cache [block, layer, k|v, kv_head, slot, head_dim]; blocks int64 [n], the cache's blocks; stored uint8 [n,
block_bytes], see `kernels/kv_int8.py`, which is the reference.
dtypes: float32, float16, bfloat16. If the compiler fuses a multiplication and an addition, restored values differ from
the reference in float32's last bit. Codes differ if a value is equally far from two of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from alignedserve.kernels.kv_int8 import bounds_bytes, stored_bytes
from alignedserve.kernels.triton.checks import check_cache, check_tensor

# Values of a program. With 16 slots, they are all of a head's columns.
TILE = 4096


@triton.jit
def quantise_kernel(
    cache,
    blocks,
    bounds,
    codes,
    block_stride,
    bounds_stride,
    codes_stride,
    tail,
    num_tail_slots,
    NUM_SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    number, group = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    exists = (slot < NUM_SLOTS)[:, None] & (column < HEAD_DIM)[None, :]
    num_filled = tl.where(number == tail, num_tail_slots, NUM_SLOTS)
    is_filled = exists & (slot < num_filled)[:, None]
    places = (group * NUM_SLOTS + slot)[:, None] * HEAD_DIM + column[None, :]
    source = cache + tl.load(blocks + number) * block_stride
    x = tl.load(source + places, is_filled, other=0.0).to(tl.float32)
    # Adding zero turns a negative zero into zero, because their bytes differ.
    low = tl.min(tl.where(is_filled, x, float("inf")), 0) + 0.0
    high = tl.max(tl.where(is_filled, x, float("-inf")), 0) + 0.0
    is_bad = (tl.max((x - x != 0.0).to(tl.int32), 0) > 0) | (high - low == float("inf"))
    # 2^-100: see LEAST_SPAN.
    is_wide = (high - low >= 7.888609052210118e-31) & (is_bad == 0)
    span = tl.where(is_wide, high - low, 1.0)
    scale = tl.where(is_wide, tl.div_rn(tl.full([COLUMNS], 255.0, tl.float32), span), 0.0)
    high = tl.where(is_wide, high, low)
    nan = float("nan")
    at = bounds + number.to(tl.int64) * bounds_stride + group * 2 * HEAD_DIM + column
    dtype = bounds.dtype.element_ty
    tl.store(at, tl.where(is_bad, nan, low).to(dtype), column < HEAD_DIM)
    tl.store(at + HEAD_DIM, tl.where(is_bad, nan, high).to(dtype), column < HEAD_DIM)
    # Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the low bits of the mantissa.
    shifted = (x - low[None, :]) * scale[None, :] + 12582912.0
    code = shifted.to(tl.int32, bitcast=True) & 255
    code = tl.where(is_filled & is_wide[None, :], code, 0)
    tl.store(codes + number.to(tl.int64) * codes_stride + places, code.to(tl.uint8), exists)


@triton.jit
def dequantise_kernel(
    cache,
    blocks,
    bounds,
    codes,
    block_stride,
    bounds_stride,
    codes_stride,
    NUM_SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    number, group = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    exists = (slot < NUM_SLOTS)[:, None] & (column < HEAD_DIM)[None, :]
    at = bounds + number.to(tl.int64) * bounds_stride + group * 2 * HEAD_DIM + column
    low = tl.load(at, column < HEAD_DIM, other=0.0).to(tl.float32)
    high = tl.load(at + HEAD_DIM, column < HEAD_DIM, other=0.0).to(tl.float32)
    scale = tl.div_rn(high - low, tl.full([COLUMNS], 255.0, tl.float32))
    places = (group * NUM_SLOTS + slot)[:, None] * HEAD_DIM + column[None, :]
    code = tl.load(codes + number.to(tl.int64) * codes_stride + places, exists, other=0).to(tl.int32)
    value = code.to(tl.float32) * scale[None, :] + low[None, :]
    value = tl.where(code == 255, high[None, :], value)
    target = cache + tl.load(blocks + number) * block_stride
    tl.store(target + places, value.to(cache.dtype.element_ty), exists)


def quantise(
    cache: torch.Tensor,
    blocks: torch.Tensor,
    stored: torch.Tensor,
    tail: int = -1,
    num_tail_slots: int = 1,
) -> None:
    """Stores these blocks of the cache. If `tail` is not -1, only the first `num_tail_slots` slots of blocks[tail]
    are filled."""
    _check(cache, blocks, stored)
    if not 1 <= num_tail_slots <= cache.shape[4]:
        raise ValueError(f"num_tail_slots must be from 1 to {cache.shape[4]}, not {num_tail_slots}")
    if len(blocks):
        sizes = _sizes(cache)
        quantise_kernel[_grid(cache, blocks, sizes)](
            *_places(cache, blocks, stored), tail, num_tail_slots, **sizes, num_warps=4
        )


def dequantise(stored: torch.Tensor, cache: torch.Tensor, blocks: torch.Tensor) -> None:
    """Restores these blocks of the cache."""
    _check(cache, blocks, stored)
    if len(blocks):
        sizes = _sizes(cache)
        dequantise_kernel[_grid(cache, blocks, sizes)](*_places(cache, blocks, stored), **sizes, num_warps=4)


def _sizes(cache: torch.Tensor) -> dict[str, int]:
    num_slots, head_dim = cache.shape[4:]
    slots = triton.next_power_of_2(num_slots)
    columns = min(triton.next_power_of_2(head_dim), max(TILE // slots, 16))
    return {"NUM_SLOTS": num_slots, "HEAD_DIM": head_dim, "SLOTS": slots, "COLUMNS": columns}


def _grid(cache: torch.Tensor, blocks: torch.Tensor, sizes: dict[str, int]) -> tuple[int, int, int]:
    _, num_layers, _, num_kv_heads, _, head_dim = cache.shape
    return len(blocks), num_layers * 2 * num_kv_heads, triton.cdiv(head_dim, sizes["COLUMNS"])


def _places(
    cache: torch.Tensor, blocks: torch.Tensor, stored: torch.Tensor
) -> tuple[torch.Tensor | int, ...]:
    num_bounds = bounds_bytes(cache)
    bounds, codes = stored[:, :num_bounds].view(cache.dtype), stored[:, num_bounds:]
    return cache, blocks, bounds, codes, cache.stride(0), bounds.stride(0), codes.stride(0)


def _check(cache: torch.Tensor, blocks: torch.Tensor, stored: torch.Tensor) -> None:
    check_cache("cache", cache)
    if not cache.is_contiguous():
        raise ValueError(f"cache must be contiguous, not of strides {cache.stride()}")
    check_tensor("blocks", blocks, (len(blocks),), torch.int64, cache.device)
    check_tensor("stored", stored, (len(blocks), stored_bytes(cache)), torch.uint8, cache.device)
