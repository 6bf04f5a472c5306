"""Contexts of several sequences, out of the paged cache and side by side: what varlen prefill attention reads.

Grid: (tiles of TILE tokens of the longest context, kv heads, sequences); tiles past a sequence's context do nothing.
Shapes: cache [block, layer, k|v, kv_head, slot, head_dim]; block_table [seqs, max_blocks] int32, rows may lie apart;
cu_context [seqs + 1] int32, from where to where each context goes; k, v [total_context, kv_heads, head_dim].
dtypes: any float that the cache may have; bytes are copied as they are.
The contexts' lengths are read on the GPU. The host knows only bounds: of the longest (for the grid), and of all of them
together (for the result).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.checks import check_cache, check_layer, check_tensor

TILE = 32


@triton.jit(do_not_specialize=["layer"])
def gather_kv_kernel(
    cache,
    block_table,
    cu_context,
    k_out,
    v_out,
    layer,
    block_stride,
    layer_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    head = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    first = tl.load(cu_context + seq)
    length = tl.load(cu_context + seq + 1) - first
    start = tl.program_id(0) * TILE
    if start < length:
        tokens = start + tl.arange(0, TILE)
        columns = tl.arange(0, WIDTH)
        exists = tokens < length
        blocks = tl.load(block_table + seq * table_stride + tokens // BLOCK_SIZE, exists, other=0)
        rows = blocks.to(tl.int64) * block_stride + tl.cast(layer, tl.int64) * layer_stride
        rows += (head * BLOCK_SIZE + tokens % BLOCK_SIZE) * HEAD_DIM
        source = cache + rows[:, None] + columns[None, :]
        target = (((first + tokens).to(tl.int64) * NUM_KV_HEADS + head) * HEAD_DIM)[:, None] + columns[
            None, :
        ]
        mask = exists[:, None] & (columns < HEAD_DIM)[None, :]
        k = tl.load(source, mask)
        v = tl.load(source + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask)
        tl.store(k_out + target, k, mask)
        tl.store(v_out + target, v, mask)


def gather_kv(
    cache: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    cu_context: torch.Tensor,
    max_context: int,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """`max_context` is at least the longest context; `k_out` and `v_out` have rows for all of them, or more."""
    check_cache("cache", cache)
    check_layer(layer, cache)
    _, _, _, num_kv_heads, block_size, head_dim = cache.shape
    num_seqs = len(cu_context) - 1
    check_tensor("cu_context", cu_context, (num_seqs + 1,), torch.int32, cache.device)
    if block_table.dtype != torch.int32 or block_table.device != cache.device:
        raise ValueError(f"block_table must be int32 on {cache.device}, not {block_table.dtype}")
    if block_table.dim() != 2 or len(block_table) < num_seqs or block_table.stride(1) != 1:
        raise ValueError(f"block_table must hold a contiguous row for each of {num_seqs} sequences")
    if not 0 <= max_context <= block_table.shape[1] * block_size:
        raise ValueError(f"max_context must fit the block table, {max_context} does not")
    for name, out in (("k_out", k_out), ("v_out", v_out)):
        check_tensor(name, out, (len(k_out), num_kv_heads, head_dim), cache.dtype, cache.device)
    if num_seqs <= 0 or max_context == 0:
        return
    gather_kv_kernel[(triton.cdiv(max_context, TILE), num_kv_heads, num_seqs)](
        cache,
        block_table,
        cu_context,
        k_out,
        v_out,
        layer,
        cache.stride(0),
        cache.stride(1),
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE=TILE,
        WIDTH=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def gather_kv_reference(
    cache: torch.Tensor, layer: int, block_table: torch.Tensor, context_lens: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    block_size = cache.shape[4]
    gathered: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for seq, length in enumerate(context_lens):
        blocks = block_table[seq, : -(-length // block_size)].long()
        for which in range(2):
            gathered[which].append(cache[blocks, layer, which].transpose(1, 2).flatten(0, 1)[:length])
    return torch.cat(gathered[0]), torch.cat(gathered[1])
