"""An 8-bit cache: the written bytes equal the reference's, and reading yields the numbers they represent."""

from __future__ import annotations

import pytest
import torch

from alignedserve.kernels.kv_rows import FP8, INT8, as_movable, to_rows
from tests.kernels.triton.harness import DEVICE, DTYPES, ints, poison, randn

triton = pytest.importorskip("triton")

from alignedserve.kernels.triton.gather_kv import gather_kv, gather_kv_reference  # noqa: E402
from alignedserve.kernels.triton.rope_write import rope_write, rope_write_reference  # noqa: E402
from tests.kernels.triton.test_decode_attention import SMALL, Case  # noqa: E402

CODED = pytest.mark.parametrize("coding", [FP8, INT8], ids=str)


def blank_cache(*size: int, coding: torch.dtype) -> torch.Tensor:
    """Of rows that mean NaN."""
    return to_rows(torch.full(size, float("nan")), coding).to(DEVICE)


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8)


@pytest.mark.drawn(one_in=5)
@CODED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 8), (6, 6, 80), (9, 3, 128)])
def test_rows_are_written_as_the_reference_has_them(
    coding: torch.dtype, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    qkv = randn(9, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    # Of magnitudes from what e4m3 has no more of to what it has not yet.
    qkv *= torch.tensor([1e-4, 1e-2, 1.0, 30.0, 200.0, 1e3, 0.0, 1.0, 1.0], device=DEVICE)[:, None].to(dtype)
    qkv[7, -1], qkv[7, -head_dim - 1], qkv[8, -2] = float("nan"), float("inf"), -float("inf")
    slots = ints(0, 27, 5, -1, 12, 6, 7, 8, 9)
    positions = torch.zeros(9, dtype=torch.int32, device=DEVICE)
    cache = blank_cache(7, 3, 2, kv_heads, 4, head_dim, coding=coding)
    expected = cache.clone()
    q, _, _ = rope_write_reference(qkv, positions, slots, expected, 1, heads)
    torch.testing.assert_close(rope_write(qkv, positions, slots, cache, 1, heads), q, rtol=0, atol=0)
    assert torch.equal(as_bytes(cache), as_bytes(expected))


@pytest.mark.drawn(one_in=3)
@CODED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contexts_are_gathered_as_numbers(coding: torch.dtype, dtype: torch.dtype) -> None:
    lens, kv_heads, block_size, head_dim = [5, 0, 37], 3, 4, 24
    cache = blank_cache(20, 2, 2, kv_heads, block_size, head_dim, coding=coding)
    table = torch.randperm(20, dtype=torch.int32)[:15].view(3, 5).repeat(1, 2).to(DEVICE)
    table[2] = torch.randperm(20, dtype=torch.int32)[:10].to(DEVICE)
    needed = [-(-length // block_size) for length in lens]
    used = torch.cat([table[seq, :count] for seq, count in enumerate(needed)]).long().unique()
    rows = to_rows(randn(len(used), 2, 2, kv_heads, block_size, head_dim), coding)
    as_movable(cache)[used] = as_movable(rows)
    k, v = (poison(sum(lens) + 2, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    starts = ints(0, *torch.tensor(lens).cumsum(0).tolist())
    is_reversed = ints(0, 0, 1)
    gather_kv(cache, 1, table.flatten(), ints(table.shape[1]), ints(0), starts, k, v, is_reversed)
    expected = gather_kv_reference(cache, 1, table, lens, reversed_rows=[2])
    for actual, wanted in zip((k, v), expected, strict=True):
        # The interpreter cuts a float32 off to bfloat16 where a GPU rounds.
        exact = dtype != torch.bfloat16 or DEVICE == "cuda"
        close = dict(rtol=0, atol=0) if exact else dict(rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(actual[: sum(lens)].float(), wanted.to(dtype).float(), **close)
        assert actual[sum(lens) :].isnan().all()


@pytest.mark.drawn(one_in=3)
@CODED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("window", "reversed_seqs"), [(None, ()), (20, (0, 2))])
def test_decodes_attend_to_what_rows_mean(
    coding: torch.dtype, dtype: torch.dtype, window: int | None, reversed_seqs: tuple[int, ...]
) -> None:
    case = Case([1, 33, 17, 100], 6, 3, 80, dtype, reversed_seqs=reversed_seqs)
    case.cache = to_rows(case.cache.float(), coding)
    case.check(case.plain(SMALL, window), window)
    case.check(case.balanced(5, SMALL, window), window)
