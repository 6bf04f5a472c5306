from __future__ import annotations

import torch

from alignedserve.engine.kv_cache import KVCache, new_blocks
from alignedserve.kv.format import BlockFormat
from alignedserve.types import BlockId


def test_a_block_is_one_piece_of_memory() -> None:
    form = BlockFormat(num_layers=3, block_size=16, num_kv_heads=4, head_dim=64, dtype="bfloat16")
    cache = KVCache(form, [new_blocks(form, 2, torch.device("cpu"))])
    assert cache.blocks[0].is_contiguous()
    assert cache.blocks[0].numel() * 2 == form.block_bytes == 3 * 2 * 16 * 4 * 64 * 2
    assert (form.num_columns(16), form.num_columns(17)) == (1, 2)


def test_blocks_are_filled_and_copied_in_the_memory_of_each_rank() -> None:
    form = BlockFormat(num_layers=3, block_size=16, num_kv_heads=4, head_dim=64, dtype="float32", num_ranks=2)
    cache = KVCache(form, [new_blocks(form, 4, torch.device("cpu")).zero_() for _ in range(2)])
    assert sum(part[0].nbytes for part in cache.parts) == form.block_bytes
    values = torch.randn(form.shape)
    cache.fill([BlockId(1)], values)
    cache.copy(BlockId(1), BlockId(3))
    for part in cache.parts:
        assert all(torch.equal(part[block], values) for block in (1, 3))
        assert not part[0].any() and not part[2].any()
