"""Copies the contexts of several sequences from the paged cache to contiguous memory, for varlen prefill attention.

Grid: (programs, kv heads). Each program takes every num_programs-th tile of TILE tokens.

    cache           [block, layer, k|v, kv_head, slot, row] (kv_rows.py)
    block_table     int32, flat; sequence s's blocks of this layer group are at (s * num_groups + group) *
                    table_stride[0]; -1 for a freed block, which gives zeros
    first_row       [1]: the first of these sequences
    is_reversed     int32: 1 for each sequence that fills its blocks from the last slot down; or None
    context_start   [seqs + 1] int32, the bounds of the contexts
    k, v            [total context, kv_heads, head_dim]

dtypes: k and v have the cache's, and bytes are copied unchanged. If the cache is in 8 bits, they may be any float.
All numbers are read on the GPU. The host knows only a bound of all contexts together: the rows of k and v.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import triton
import triton.language as tl

from alignedserve.kernels.kv_rows import as_movable, from_rows, head_dim_of, is_coded
from alignedserve.kernels.triton.checks import FLOATS, check_cache, check_layer, check_tensor
from alignedserve.kernels.triton.kv_rows import codes_of, load_scales, numbers, scales_of

TILE = 32
# Programs per KV head: enough to fill a GPU, few enough to start at once for small work.
MAX_PROGRAMS = 256


@triton.jit(do_not_specialize=["layer", "num_seqs", "group", "num_groups"])
def gather_kv_kernel(
    cache,
    scales,
    block_table,
    table_stride,
    first_row,
    is_reversed,
    context_start,
    num_seqs,
    k_out,
    v_out,
    layer,
    group,
    num_groups,
    block_stride,
    layer_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    SEQ_BITS: tl.constexpr,
):
    head = tl.program_id(1)
    total = tl.load(context_start + num_seqs)
    group_stride = tl.load(table_stride).to(tl.int64)
    row_stride = num_groups * group_stride
    table = block_table + tl.load(first_row) * row_stride + group * group_stride
    columns = tl.arange(0, WIDTH)
    for start in range(tl.program_id(0) * TILE, total, tl.num_programs(0) * TILE):
        token = start + tl.arange(0, TILE)
        exists = token < total
        # A token belongs to the last sequence that begins at or before it.
        row = tl.zeros([TILE], tl.int32)
        for bit in tl.static_range(SEQ_BITS):
            later = row + (1 << (SEQ_BITS - 1 - bit))
            begin = tl.load(context_start + later, exists & (later < num_seqs), other=2147483647)
            row = tl.where(begin <= token, later, row)
        position = token - tl.load(context_start + row, exists, other=0)
        block = tl.load(table + row * row_stride + position // BLOCK_SIZE, exists, other=-1)
        # A block before the window may have been freed.
        is_held = block >= 0
        source = block.to(tl.int64) * block_stride + tl.cast(layer, tl.int64) * layer_stride
        slot = position % BLOCK_SIZE
        if is_reversed is not None:
            first_slot = tl.load(is_reversed + tl.load(first_row) + row, exists, other=0) * (BLOCK_SIZE - 1)
            slot = tl.abs(first_slot - slot)
        source += (head * BLOCK_SIZE + slot) * ROW
        target = (token.to(tl.int64) * NUM_KV_HEADS + head) * HEAD_DIM
        for which in tl.static_range(2):
            out = k_out if which == 0 else v_out
            mask = exists[:, None] & (columns < HEAD_DIM)[None, :]
            codes = tl.load(cache + source[:, None] + columns[None, :], mask & is_held[:, None], other=0)
            if scales is not None:
                x = numbers(codes, tl.float32) * load_scales(scales, source, HEAD_DIM, is_held)[:, None]
            else:
                x = numbers(codes, out.dtype.element_ty)
            tl.store(out + target[:, None] + columns[None, :], x.to(out.dtype.element_ty), mask)
            source += NUM_KV_HEADS * BLOCK_SIZE * ROW


def gather_kv(
    cache: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    table_stride: torch.Tensor,
    first_row: torch.Tensor,
    context_start: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    is_reversed: torch.Tensor | None = None,
    group: int = 0,
    num_groups: int = 1,
) -> None:
    """`k_out` and `v_out` have rows for all contexts, or more."""
    check_cache("cache", cache)
    check_layer(layer, cache)
    _, _, _, num_kv_heads, block_size, row = cache.shape
    head_dim = head_dim_of(cache)
    num_seqs = len(context_start) - 1
    check_tensor("context_start", context_start, (max(num_seqs, 0) + 1,), torch.int32, cache.device)
    check_tensor("block_table", block_table, (len(block_table),), torch.int32, cache.device)
    for name, number in (("table_stride", table_stride), ("first_row", first_row)):
        check_tensor(name, number, (1,), torch.int32, cache.device)
    if is_reversed is not None:
        check_tensor("is_reversed", is_reversed, (len(is_reversed),), torch.int32, cache.device)
    for name, out in (("k_out", k_out), ("v_out", v_out)):
        dtype = out.dtype if is_coded(cache) and out.dtype in FLOATS else cache.dtype
        check_tensor(name, out, (len(k_out), num_kv_heads, head_dim), dtype, cache.device)
    if num_seqs == 0 or len(k_out) == 0:
        return
    gather_kv_kernel[(min(triton.cdiv(len(k_out), TILE), MAX_PROGRAMS), num_kv_heads)](
        codes_of(cache),
        scales_of(cache),
        block_table,
        table_stride,
        first_row,
        is_reversed,
        context_start,
        num_seqs,
        k_out,
        v_out,
        layer,
        group,
        num_groups,
        cache.stride(0),
        cache.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROW=row,
        BLOCK_SIZE=block_size,
        TILE=TILE,
        WIDTH=triton.next_power_of_2(head_dim),
        SEQ_BITS=(num_seqs - 1).bit_length(),
        num_warps=4,
    )


def gather_kv_reference(
    cache: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    context_lens: list[int],
    reversed_rows: Collection[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    block_size = cache.shape[4]
    gathered: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for seq, length in enumerate(context_lens):
        blocks = block_table[seq, : -(-length // block_size)].long()
        held = from_rows(as_movable(cache)[blocks, layer].view(cache.dtype))
        held = held.flip(3) if seq in reversed_rows else held
        for which in range(2):
            gathered[which].append(held[:, which].transpose(1, 2).flatten(0, 1)[:length])
    return torch.cat(gathered[0]), torch.cat(gathered[1])
