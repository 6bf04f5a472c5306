from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.engine.blocks import BlockManager
from alignedserve.engine.kv_cache import KVCache
from alignedserve.kv_format import BlockFormat
from alignedserve.types import BlockId, RequestId

A, B = RequestId("a"), RequestId("b")


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 6), st.booleans()), max_size=60))
def test_no_sequence_of_calls_loses_or_doubles_a_block(calls: list[tuple[str, int, bool]]) -> None:
    blocks = BlockManager(10)
    for name, count, is_free in calls:
        owner, before = RequestId(name), blocks.num_free
        if is_free:
            blocks.free(owner)
        else:
            found = blocks.allocate(owner, count)
            assert (found is None) == (count > before)
            assert blocks.num_free == before - len(found or [])
        blocks.check()
    for name in "abcd":
        blocks.free(RequestId(name))
    blocks.check_idle()
    assert blocks.num_free == 10


def test_leaks_are_told_with_both_numbers() -> None:
    blocks = BlockManager(4)
    blocks.allocate(A, 3)
    with pytest.raises(RuntimeError, match=r"1 requests hold blocks.*a"):
        blocks.check_idle()
    blocks._free.pop()
    with pytest.raises(RuntimeError, match=r"3 held \+ 0 free != 4"):
        blocks.check()


def test_saved_blocks_come_back_elsewhere_and_the_same() -> None:
    form = BlockFormat(num_layers=2, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
    cache = KVCache(form, 6, torch.device("cpu"))
    cache.blocks.normal_()
    before = cache.blocks[[1, 4]].clone()
    cache.save(A, [BlockId(1), BlockId(4)])
    assert cache.num_saved_blocks == 2
    cache.blocks.zero_()
    cache.restore(A, [BlockId(5), BlockId(0), BlockId(2)])
    assert torch.equal(cache.blocks[[5, 0]], before)
    assert not cache.blocks[2].any() and cache.num_saved_blocks == 0
    cache.drop(B)


def test_a_block_is_one_piece_of_memory() -> None:
    form = BlockFormat(num_layers=3, block_size=16, num_kv_heads=4, head_dim=64, dtype="bfloat16")
    cache = KVCache(form, 2, torch.device("cpu"))
    assert cache.blocks[0].is_contiguous()
    assert cache.blocks[0].numel() * 2 == form.block_bytes == 3 * 2 * 16 * 4 * 64 * 2
    assert (form.num_blocks(16), form.num_blocks(17)) == (1, 2)
