"""The operations on q, k and v between the qkv projection and attention, in one pass.

q and k heads are normed (if weights are given), and their first rotary_dim values rotated. k and v are written to the
paged cache, q to `q_out`.

Grid: (tokens, groups of q heads + groups of k heads + groups of v heads).

    qkv                [tokens, (heads + 2 * kv_heads) * head_dim], rows may be strided
    positions, slots   [tokens] int32
    rope               [max_position, rotary_dim] float32, cos of rotary_dim/2 angles and then their sin
    q_norm, k_norm     [head_dim]
    cache              [block, layer, k|v, kv_head, slot, row] (kv_rows.py)
    q_out              [tokens, heads, head_dim]

dtypes: float32, float16, bfloat16, the cache may be 8 bits; arithmetic in float32. The result of a norm is rounded to
the dtype before it is rotated, as it is with separate operations. K is rounded, too, before it is put into 8 bits.

A program holds a head's values in two halves, low and high: first the pairs that are rotated into each other, then one
half each of the rest. A token with slot -1 is padding: it is not written to the cache, and its position is not used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from alignedserve.kernels.kv_rows import INT8, as_movable, head_dim_of, is_coded, to_rows
from alignedserve.kernels.triton.checks import (
    check_cache,
    check_layer,
    check_like,
    check_rows,
    check_tensor,
    check_vector,
)
from alignedserve.kernels.triton.kv_rows import codes_of, quantise_heads, scales_of, to_fp8
from alignedserve.kernels.triton.launch import dependent_launch, start_dependents, wait_for_dependency

# Up to this many tokens, programs are small: all of them fit the GPU at once, and each is as short as possible.
FEW_TOKENS = 256


@triton.jit(do_not_specialize=["layer"])
def rope_write_kernel(
    qkv,
    positions,
    slots,
    rope,
    q_norm,
    k_norm,
    cache,
    scales,
    q_out,
    layer,
    eps,
    qkv_stride,
    block_stride,
    layer_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    Q_GROUPS: tl.constexpr = (NUM_HEADS + GROUP - 1) // GROUP
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + GROUP - 1) // GROUP
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    slot = tl.load(slots + token)
    position = tl.where(slot < 0, 0, tl.load(positions + token)).to(tl.int64)
    wait_for_dependency(PDL)
    start_dependents(PDL)
    row = qkv + token * qkv_stride
    if group < Q_GROUPS:
        low, high = load_heads(row, group, NUM_HEADS, HEAD_DIM, ROTARY_DIM, HALF, GROUP)
        low, high = norm_heads(low, high, q_norm, eps, HEAD_DIM, ROTARY_DIM, HALF, qkv.dtype.element_ty)
        low, high = rotate_heads(low, high, rope, position, ROTARY_DIM, HALF)
        out = q_out + token * (NUM_HEADS * HEAD_DIM)
        store_heads(out, HEAD_DIM, True, low, high, group, NUM_HEADS, HEAD_DIM, ROTARY_DIM, HALF, GROUP)
    else:
        block = (slot // BLOCK_SIZE).to(tl.int64)
        place = block * block_stride + tl.cast(layer, tl.int64) * layer_stride
        place += (slot % BLOCK_SIZE) * ROW
        wanted = slot >= 0
        if group < Q_GROUPS + KV_GROUPS:
            group -= Q_GROUPS
            row += NUM_HEADS * HEAD_DIM
            low, high = load_heads(row, group, NUM_KV_HEADS, HEAD_DIM, ROTARY_DIM, HALF, GROUP)
            low, high = norm_heads(low, high, k_norm, eps, HEAD_DIM, ROTARY_DIM, HALF, qkv.dtype.element_ty)
            low, high = rotate_heads(low, high, rope, position, ROTARY_DIM, HALF)
            low = low.to(qkv.dtype.element_ty).to(tl.float32)
            high = high.to(qkv.dtype.element_ty).to(tl.float32)
        else:
            group -= Q_GROUPS + KV_GROUPS
            row += (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
            place += NUM_KV_HEADS * BLOCK_SIZE * ROW
            low, high = load_heads(row, group, NUM_KV_HEADS, HEAD_DIM, ROTARY_DIM, HALF, GROUP)
        store_rows(
            cache,
            scales,
            place,
            wanted,
            low,
            high,
            group,
            NUM_KV_HEADS,
            HEAD_DIM,
            ROTARY_DIM,
            ROW,
            BLOCK_SIZE,
            HALF,
            GROUP,
        )


@triton.jit
def store_rows(
    cache,
    scales,
    place,
    wanted,
    low,
    high,
    group,
    num_heads,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Stores a token's K or V. Its first head's row begins at `place`."""
    head_stride: tl.constexpr = BLOCK_SIZE * ROW
    if scales is not None:
        low_codes, high_codes, scale = quantise_heads(low, high)
        store_heads(
            cache + place,
            head_stride,
            wanted,
            low_codes,
            high_codes,
            group,
            num_heads,
            HEAD_DIM,
            ROTARY_DIM,
            HALF,
            GROUP,
        )
        heads = group * GROUP + tl.arange(0, GROUP)
        at = scales + (place + heads * head_stride + HEAD_DIM) // 4
        tl.store(at, scale, (heads < num_heads) & wanted)
    elif cache.dtype.element_ty == tl.uint8:
        store_heads(
            cache + place,
            head_stride,
            wanted,
            to_fp8(low),
            to_fp8(high),
            group,
            num_heads,
            HEAD_DIM,
            ROTARY_DIM,
            HALF,
            GROUP,
        )
    else:
        store_heads(
            cache + place, head_stride, wanted, low, high, group, num_heads, HEAD_DIM, ROTARY_DIM, HALF, GROUP
        )


@triton.jit
def columns_of_halves(HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, HALF: tl.constexpr):
    """Returns the columns of the two halves' values in a head."""
    columns = tl.arange(0, HALF)
    if ROTARY_DIM == HEAD_DIM:
        return columns, columns + HEAD_DIM // 2
    is_rotated = columns < ROTARY_DIM // 2
    low = tl.where(is_rotated, columns, columns + ROTARY_DIM // 2)
    return low, low + tl.where(is_rotated, ROTARY_DIM // 2, (HEAD_DIM - ROTARY_DIM) // 2)


@triton.jit
def places(
    group,
    head_stride,
    num_heads,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Returns the offsets of the halves of a group of heads, and which of them exist."""
    heads = group * GROUP + tl.arange(0, GROUP)
    exists = (heads < num_heads)[:, None] & (tl.arange(0, HALF) < HEAD_DIM // 2)[None, :]
    low, high = columns_of_halves(HEAD_DIM, ROTARY_DIM, HALF)
    return heads[:, None] * head_stride + low[None, :], heads[:, None] * head_stride + high[None, :], exists


@triton.jit
def load_heads(
    row,
    group,
    num_heads,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
):
    low_at, high_at, exists = places(group, HEAD_DIM, num_heads, HEAD_DIM, ROTARY_DIM, HALF, GROUP)
    low = tl.load(row + low_at, exists, other=0.0)
    high = tl.load(row + high_at, exists, other=0.0)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def store_heads(
    out,
    head_stride,
    wanted,
    low,
    high,
    group,
    num_heads,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
):
    low_at, high_at, exists = places(group, head_stride, num_heads, HEAD_DIM, ROTARY_DIM, HALF, GROUP)
    tl.store(out + low_at, low.to(out.dtype.element_ty), exists & wanted)
    tl.store(out + high_at, high.to(out.dtype.element_ty), exists & wanted)


@triton.jit
def norm_heads(
    low,
    high,
    weight,
    eps,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF: tl.constexpr,
    dtype: tl.constexpr,
):
    if weight is not None:
        exists = tl.arange(0, HALF) < HEAD_DIM // 2
        low_at, high_at = columns_of_halves(HEAD_DIM, ROTARY_DIM, HALF)
        squares = tl.sum(low * low + high * high, axis=1) / HEAD_DIM
        scale = tl.rsqrt(squares + eps)[:, None]
        low_weight = tl.load(weight + low_at, exists, other=0.0).to(tl.float32)
        high_weight = tl.load(weight + high_at, exists, other=0.0).to(tl.float32)
        low = (low * scale * low_weight[None, :]).to(dtype).to(tl.float32)
        high = (high * scale * high_weight[None, :]).to(dtype).to(tl.float32)
    return low, high


@triton.jit
def rotate_heads(low, high, rope, position, ROTARY_DIM: tl.constexpr, HALF: tl.constexpr):
    """Values beyond the table have an angle of zero, so they stay."""
    if rope is not None:
        columns = tl.arange(0, HALF)
        exists = columns < ROTARY_DIM // 2
        angles = rope + position * ROTARY_DIM
        cos = tl.load(angles + columns, exists, other=1.0)[None, :]
        sin = tl.load(angles + ROTARY_DIM // 2 + columns, exists, other=0.0)[None, :]
        low, high = low * cos - high * sin, high * cos + low * sin
    return low, high


def rope_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    num_heads: int,
    rope: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `q_out`, which is allocated if not given."""
    _check(qkv, positions, slots, cache, layer, num_heads, rope, q_norm, k_norm)
    num_tokens = qkv.shape[0]
    _, _, _, num_kv_heads, block_size, row = cache.shape
    head_dim = head_dim_of(cache)
    if q_out is None:
        q_out = qkv.new_empty(num_tokens, num_heads, head_dim)
    check_like("q_out", q_out, (num_tokens, num_heads, head_dim), qkv)
    if num_tokens == 0:
        return q_out
    group, num_warps = (4, 1) if num_tokens <= FEW_TOKENS else (16, 4)
    num_groups = triton.cdiv(num_heads, group) + 2 * triton.cdiv(num_kv_heads, group)
    rope_write_kernel[(num_tokens, num_groups)](
        qkv,
        positions,
        slots,
        rope,
        q_norm,
        k_norm,
        codes_of(cache),
        scales_of(cache),
        q_out,
        layer,
        eps,
        qkv.stride(0),
        cache.stride(0),
        cache.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=head_dim if rope is None else rope.shape[1],
        ROW=row,
        BLOCK_SIZE=block_size,
        HALF=triton.next_power_of_2(head_dim // 2),
        GROUP=group,
        num_warps=num_warps,
        # Fusing a product with the sum that rounds it to a code would give another code near the middle of two.
        enable_fp_fusion=cache.dtype != INT8,
        **dependent_launch(),
    )
    return q_out


def _check(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    num_heads: int,
    rope: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
) -> None:
    check_rows("qkv", qkv)
    check_cache("cache", cache)
    check_layer(layer, cache)
    if not (is_coded(cache) or cache.dtype == qkv.dtype) or cache.device != qkv.device:
        raise ValueError(f"cache must be {qkv.dtype} on {qkv.device}, not {cache.dtype} on {cache.device}")
    num_kv_heads, head_dim = cache.shape[3], head_dim_of(cache)
    if qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim:
        raise ValueError(
            f"qkv must hold {num_heads} + 2 * {num_kv_heads} heads of {head_dim}, not {qkv.shape[1]} columns"
        )
    for name, ints in (("positions", positions), ("slots", slots)):
        check_tensor(name, ints, (qkv.shape[0],), torch.int32, qkv.device)
    if rope is not None:
        rotary_dim = rope.shape[1]
        if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
            raise ValueError(
                f"rope must be an even number of values wide, at most {head_dim}, not {rotary_dim}"
            )
        check_tensor("rope", rope, (rope.shape[0], rotary_dim), torch.float32, qkv.device)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_vector(name, weight, head_dim, qkv.device)


def rope_write_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    num_heads: int,
    rope: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Writes k and v into `cache`. Returns q, k and v [tokens, heads, head_dim]. All positions must be in the table."""
    num_kv_heads, block_size, head_dim = *cache.shape[3:5], head_dim_of(cache)
    heads = qkv.unflatten(1, (-1, head_dim))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q = _rotated(_normed(q, q_norm, eps), positions, rope)
    k = _rotated(_normed(k, k_norm, eps), positions, rope)
    rows, k_rows, v_rows = (as_movable(x) for x in (cache, to_rows(k, cache.dtype), to_rows(v, cache.dtype)))
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            rows[slot // block_size, layer, 0, :, slot % block_size] = k_rows[token]
            rows[slot // block_size, layer, 1, :, slot % block_size] = v_rows[token]
    return q, k, v


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return x
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x.float() * scale * weight.float()).to(x.dtype)


def _rotated(x: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor | None) -> torch.Tensor:
    if rope is None:
        return x
    cos, sin = rope[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    rotary_dim = rope.shape[1]
    (low, high), rest = x.float()[..., :rotary_dim].chunk(2, dim=-1), x.float()[..., rotary_dim:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1).to(x.dtype)
