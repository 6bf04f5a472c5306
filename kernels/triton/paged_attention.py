"""What the kernels of attention over paged KV have in common: their inputs, a tile of keys, and parts of results.

A part is what some keys add to rows: their undivided weighted values, and their maximum and sum of weights. Parts of
other keys can be added to it (`add_parts`). All are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from alignedserve.kernels.kv_rows import head_dim_of, is_coded
from alignedserve.kernels.triton.kv_rows import load_scales, numbers

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class PagedStep:
    """The inputs that all layers of a group share."""

    query_start: torch.Tensor
    context_len: torch.Tensor
    # Flat. Sequence s's blocks of this layer group begin at (s * num_groups + group) * table_stride[0].
    block_table: torch.Tensor
    table_stride: torch.Tensor
    # Sequences, padding included.
    num_seqs: int
    # 1 for each sequence that fills its blocks from the last slot down; None if none does.
    is_reversed: torch.Tensor | None = None
    group: int = 0
    num_groups: int = 1


class Parts:
    """Memory for parts of this many rows."""

    def __init__(self, num_rows: int, head_dim: int, device: torch.device) -> None:
        width = triton.next_power_of_2(head_dim)
        self.values = torch.empty(num_rows, width, dtype=torch.float32, device=device)
        # Each row's maximum and sum.
        self.weights = torch.empty(num_rows, 2, dtype=torch.float32, device=device)


def check_attention(
    q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[int, int, int, int]:
    if cache.dim() != 5 or cache.shape[1] != 2 or cache[0, 0].is_contiguous() is False:
        raise ValueError(f"cache must be [block, 2, kv_head, slot, row], not {tuple(cache.shape)}")
    num_kv_heads, block_size, head_dim = *cache.shape[2:4], head_dim_of(cache)
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % num_kv_heads or q.stride()[1:] != (head_dim, 1):
        raise ValueError(
            f"q must be [tokens, n * {num_kv_heads}, {head_dim}] with contiguous rows, not {tuple(q.shape)}"
        )
    if q.dtype != out.dtype or not (is_coded(cache) or cache.dtype == q.dtype):
        raise ValueError(f"q, cache and out must have one dtype, not {q.dtype}, {cache.dtype}, {out.dtype}")
    if out.shape != q.shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {tuple(q.shape)}, not {tuple(out.shape)}")
    if sinks is not None and (sinks.shape != q.shape[1:2] or not sinks.is_contiguous()):
        raise ValueError(
            f"sinks must be contiguous, one for each of {q.shape[1]} heads, not {tuple(sinks.shape)}"
        )
    return q.shape[1], num_kv_heads, head_dim, block_size


@triton.jit
def look_up(table, tile, length, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Returns the block of each key of a tile."""
    position = tile * TILE + tl.arange(0, TILE)
    return tl.load(table + position // BLOCK_SIZE, mask=position < length, other=0)


@triton.jit
def no_keys(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the maximum, the sum and the weighted values of rows before their first tile."""
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    return highest, total, acc


@triton.jit
def attend_to_tile(
    query,
    cache,
    scales,
    kv_head,
    block,
    is_reversed,
    seq,
    tile,
    length,
    highest,
    total,
    acc,
    scale,
    block_stride,
    value_offset,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    is_row=None,
):
    """Adds one tile to the undivided weighted values, their maximum and their sum.

    `block` has the blocks of the tile's keys. They are looked up one tile earlier: otherwise the prefetching loads of
    keys would wait for them. `is_row`: the rows that attend to the tile, None for all.
    """
    dim = tl.arange(0, WIDTH)
    position = tile * TILE + tl.arange(0, TILE)
    is_key = position < length
    if WINDOW > 0:
        is_key = is_key & (position >= length - WINDOW)
    slot = position % BLOCK_SIZE
    if is_reversed is not None:
        slot = tl.abs(tl.load(is_reversed + seq) * (BLOCK_SIZE - 1) - slot)
    row = block.to(tl.int64) * block_stride + slot * ROW
    at = cache + kv_head * BLOCK_SIZE * ROW + row[:, None] + dim[None, :]
    mask = is_key[:, None] & (dim < HEAD_DIM)[None, :]
    key = numbers(tl.load(at, mask=mask, other=0), query.dtype)
    value = numbers(tl.load(at + value_offset, mask=mask, other=0), query.dtype)
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if scales is not None:
        row += kv_head * BLOCK_SIZE * ROW
        score = score * load_scales(scales, row, HEAD_DIM, is_key)[None, :]
    score = tl.where(is_key[None, :], score, float("-inf"))
    if is_row is not None:
        score = tl.where(is_row[:, None], score, float("-inf"))
    # A tile has at least one key, so this is finite in rows that attend to any.
    higher = tl.maximum(highest, tl.max(score, 1))
    base = higher
    if is_row is not None:
        base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(highest - base)
    total = total * shrink + tl.sum(weight, 1)
    if scales is not None:
        weight = weight * load_scales(scales, row + value_offset, HEAD_DIM, is_key)[None, :]
    added = acc * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    if is_row is not None:
        # NaN times a weight of zero would be NaN in other rows.
        added = tl.where(is_row[:, None], added, acc)
    return higher, total, added


@triton.jit
def attend_to_tiles(
    query, cache, scales, kv_head, table, block, is_reversed, seq, first_tile, end_tile, length, highest, total, acc,
    scale, block_stride, value_offset, HEAD_DIM: tl.constexpr, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, is_row=None,
):  # fmt: skip
    """Adds the tiles of one sequence and head. `block` has the blocks of the first tile's keys."""
    for tile in range(first_tile, end_tile):
        highest, total, acc = attend_to_tile(
            query, cache, scales, kv_head, block, is_reversed, seq, tile, length, highest, total, acc, scale,
            block_stride, value_offset, HEAD_DIM, ROW, BLOCK_SIZE, WINDOW, WIDTH, TILE, is_row,
        )  # fmt: skip
        block = look_up(table, tile + 1, length, BLOCK_SIZE, TILE)
    return highest, total, acc


@triton.jit
def leave_part(
    parts,
    weights,
    first_row,
    num_rows,
    acc,
    highest,
    total,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Stores a part's first `num_rows` rows."""
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    at = parts + (first_row + row)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(at, acc, mask=is_row[:, None])
    tl.store(weights + 2 * (first_row + row), highest, mask=is_row)
    tl.store(weights + 2 * (first_row + row) + 1, total, mask=is_row)


@triton.jit
def add_parts(acc, total, highest, parts, weights, rows, mask, is_head, WIDTH: tl.constexpr):
    """Adds several parts at once, so that their loads are issued together. `rows`, `mask`: [part, row]."""
    # Bypasses the multiprocessor's own cache, because other programs wrote the parts.
    part_highest = tl.load(weights + 2 * rows, mask=mask, other=float("-inf"), cache_modifier=".cg")
    part_total = tl.load(weights + 2 * rows + 1, mask=mask, other=0.0, cache_modifier=".cg")
    at = parts + rows[:, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    part = tl.load(at, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
    return add_loaded(acc, total, highest, part, part_total, part_highest, is_head)


@triton.jit
def add_loaded(acc, total, highest, part, part_total, part_highest, is_head):
    higher = tl.maximum(highest, tl.max(part_highest, 0))
    # Padding rows have no maximum.
    higher = tl.where(is_head, higher, 0.0)
    shrink = tl.exp2(highest - higher)
    part_shrink = tl.exp2(part_highest - higher[None, :])
    total = total * shrink + tl.sum(part_total * part_shrink, 0)
    acc = acc * shrink[:, None] + tl.sum(part * part_shrink[:, :, None], 0)
    return acc, total, higher
