from __future__ import annotations

from typing import Any

import pytest
import torch

from alignedserve.kernels.kv_rows import INT8, to_rows
from alignedserve.kernels.triton.gather_kv import TILE, gather_kv, gather_kv_reference
from tests.kernels.triton.harness import DEVICE, DTYPES, ints, poison

LAYERS = 2


def cached(
    lens: list[int], kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache that holds these contexts in shuffled blocks, NaN wherever no token is, and the block table."""
    needed = [-(-length // block_size) for length in lens]
    cache = poison(sum(needed) + 3, LAYERS, 2, kv_heads, block_size, head_dim, dtype=dtype)
    # what is in the table past a sequence's blocks must not be read
    table = torch.full((len(lens), max(needed) + 2), -(2**30), dtype=torch.int32, device=DEVICE)
    free = torch.randperm(len(cache), dtype=torch.int32, device=DEVICE)
    for seq, (length, count) in enumerate(zip(lens, needed, strict=True)):
        table[seq, :count], free = free[:count], free[count:]
        for token in range(length):
            place = cache[table[seq, token // block_size], :, :, :, token % block_size]
            place.copy_(torch.randn(place.shape))
    return cache, table


def cumulated(lens: list[int]) -> torch.Tensor:
    return ints(0, *torch.tensor(lens).cumsum(0).tolist())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "block_size", "head_dim"), [(1, 16, 128), (3, 4, 80), (2, 1, 2)])
def test_gathers_every_token_and_nothing_else(
    dtype: torch.dtype, kv_heads: int, block_size: int, head_dim: int
) -> None:
    lens = [1, TILE, 0, TILE + block_size + 1, 17, 0]
    cache, table = cached(lens, kv_heads, block_size, head_dim, dtype)
    # there may be more rows than tokens
    k, v = (poison(sum(lens) + 5, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    gather_kv(cache, 1, table.flatten(), ints(table.shape[1]), ints(0), cumulated(lens), k, v)
    for actual, expected in zip((k, v), gather_kv_reference(cache, 1, table, lens), strict=True):
        assert not expected.isnan().any()
        assert torch.equal(actual[: sum(lens)], expected)
        assert actual[sum(lens) :].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, INT8])
def test_a_block_that_is_gone_yields_zeros(dtype: torch.dtype) -> None:
    lens = [9, TILE + 9, 4]
    cache, table = cached(lens, 2, 4, 8, torch.float32)
    if dtype == INT8:
        cache = to_rows(cache.nan_to_num(0.0), INT8)
    k, v = (poison(sum(lens), 2, 8) for _ in range(2))
    expected = gather_kv_reference(cache, 1, table, lens)
    for each in expected:
        each[:4] = each[9 : 9 + TILE] = 0
    table[0, 0] = -1
    table[1, : TILE // 4] = -1
    gather_kv(cache, 1, table.flatten(), ints(table.shape[1]), ints(0), cumulated(lens), k, v)
    torch.testing.assert_close(k, expected[0])
    torch.testing.assert_close(v, expected[1])


def test_few_programs_take_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.kernels.triton.gather_kv.MAX_PROGRAMS", 2)
    lens = [3] * 37 + [TILE * 3]
    cache, table = cached(lens, 2, 4, 8, torch.float32)
    k, v = (poison(sum(lens), 2, 8) for _ in range(2))
    gather_kv(cache, 0, table.flatten(), ints(table.shape[1]), ints(0), cumulated(lens), k, v)
    expected = gather_kv_reference(cache, 0, table, lens)
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])


def test_reversed_sequences_are_gathered_in_order() -> None:
    """The second of three fills its blocks from the last slot down, as far as it has tokens."""
    lens = [5, 11, 9]
    cache, table = cached(lens, 2, 4, 8, torch.float32)
    mine = table[1, :3].long()
    cache[mine] = cache[mine].flip(4)
    rows = torch.cat([torch.full((2, table.shape[1]), -(2**30), dtype=torch.int32, device=DEVICE), table])
    k, v = (poison(25, 2, 8) for _ in range(2))
    flags = ints(1, 1, 0, 1, 0)
    gather_kv(cache, 0, rows.flatten(), ints(rows.shape[1]), ints(2), cumulated(lens), k, v, flags)
    expected = gather_kv_reference(cache, 0, table, lens, reversed_rows=[1])
    assert not expected[0].isnan().any()
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])


def test_rows_of_the_table_begin_anywhere() -> None:
    cache, table = cached([5, 9], 2, 4, 8, torch.float32)
    wide = poison(len(cache), LAYERS + 3, *cache.shape[2:])
    wide[:, 2:4] = cache
    rows = torch.full((5, 20), -(2**30), dtype=torch.int32, device=DEVICE)
    rows[3:, : table.shape[1]] = table
    k, v = (poison(14, 2, 8) for _ in range(2))
    gather_kv(wide[:, 2:4], 0, rows.flatten(), ints(20), ints(3), cumulated([5, 9]), k, v)
    expected = gather_kv_reference(cache, 0, table, [5, 9])
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])


@pytest.mark.parametrize("group", [0, 1, 2])
def test_each_group_of_layers_has_rows_of_its_own(group: int) -> None:
    """The first sequence is not gathered."""
    lens = [5, 11, TILE + 2]
    cache, table = cached(lens, 2, 4, 8, torch.float32)
    rows = torch.full((4, 3, table.shape[1]), -(2**30), dtype=torch.int32, device=DEVICE)
    rows[1:, group] = table
    k, v = (poison(sum(lens), 2, 8) for _ in range(2))
    stride, starts = ints(rows.shape[2]), cumulated(lens)
    gather_kv(cache, 0, rows.flatten(), stride, ints(1), starts, k, v, group=group, num_groups=3)
    expected = gather_kv_reference(cache, 0, table, lens)
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])


def test_nothing_to_gather() -> None:
    cache, table = cached([3], 1, 4, 8, torch.float32)
    k, v = poison(4, 1, 8), poison(4, 1, 8)
    for starts in (ints(0), ints(0, 0)):
        gather_kv(cache, 0, table.flatten(), ints(1), ints(0), starts, k, v)
    assert k.isnan().all() and v.isnan().all()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cache", dict(cache=torch.zeros(3, 2, 2, 4, 8))),
        ("layer", dict(layer=-1)),
        ("block_table", dict(block_table=torch.zeros(4))),
        ("block_table", dict(block_table=torch.zeros(2, 4, dtype=torch.int32))),
        ("table_stride", dict(table_stride=torch.zeros(2, dtype=torch.int32))),
        ("first_row", dict(first_row=torch.zeros(1, dtype=torch.int64))),
        ("context_start", dict(context_start=torch.zeros(2, dtype=torch.int64))),
        ("k_out", dict(k_out=torch.zeros(6, 1, 8, dtype=torch.float16))),
        ("v_out", dict(v_out=torch.zeros(5, 1, 8))),
    ],
)
def test_wrong_arguments_are_named(name: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = dict(
        cache=torch.zeros(3, 2, 2, 1, 4, 8),
        layer=0,
        block_table=torch.zeros(4, dtype=torch.int32),
        table_stride=torch.zeros(1, dtype=torch.int32),
        first_row=torch.zeros(1, dtype=torch.int32),
        context_start=torch.zeros(2, dtype=torch.int32),
        k_out=torch.zeros(6, 1, 8),
        v_out=torch.zeros(6, 1, 8),
    )
    with pytest.raises(ValueError, match=f"^{name} must"):
        gather_kv(**{**arguments, **change})
