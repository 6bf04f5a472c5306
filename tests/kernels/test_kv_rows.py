"""Rows of an 8-bit cache: the stored values, and that the native kernels write the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from alignedserve.kernels.kv_rows import FP8, INT8, SCALE_BYTES, from_rows, scales_of, to_rows
from alignedserve.ops.base import AttentionSpec
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.step import StepInputs
from tests.kernels.harness import DTYPES, randn
from tests.kernels.tiny_model import Chunk, fill_step

ROOT = Path(__file__).parents[2]
NAN, INF = float("nan"), float("inf")


def special_rows(head_dim: int) -> torch.Tensor:
    """Values of all magnitudes, ties between codes, zeros, and what is no number."""
    rows = randn(12, head_dim) * torch.logspace(-6, 3, 12)[:, None]
    # Halves of e4m3's steps, of numbers and of what is below the least of them.
    ties = torch.tensor([1.0625, 1.1875, -17.0, 19.0, 2.0**-10, 3 * 2.0**-10, -5 * 2.0**-10, 464.0])
    rows[3, : len(ties)] = ties[:head_dim]
    rows[4] = 0.0
    rows[5, 0] = -0.0
    rows[6] = torch.arange(head_dim) % 128 - 64.0
    rows[7, 1], rows[8, 2], rows[9, -1] = NAN, INF, -INF
    rows[10] = 1e-38
    rows[11, 0] = 3e38
    return rows


def test_e4m3_is_rounded_to_nearest_and_ends_at_448() -> None:
    values = torch.tensor([448.0, 449.0, 1e9, -1e9, 1.0625, 1.1875, 2.0**-9, 2.0**-10, -0.0, NAN, INF, -INF])
    expected = torch.tensor([448.0, 448.0, 448.0, -448.0, 1.0, 1.25, 2.0**-9, 0.0, -0.0, NAN, NAN, NAN])
    torch.testing.assert_close(from_rows(to_rows(values, FP8)), expected, rtol=0, atol=0, equal_nan=True)
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    again = to_rows(from_rows(every), FP8)
    is_number = ~every.float().isnan()
    assert torch.equal(again.view(torch.uint8)[is_number], every.view(torch.uint8)[is_number])


def test_a_row_in_int8_is_wrong_by_half_a_scale_at_most() -> None:
    values = randn(50, 3, 64) * torch.logspace(-20, 20, 50)[:, None, None]
    rows = to_rows(values, INT8)
    assert rows.shape == (50, 3, 64 + SCALE_BYTES)
    scales = scales_of(rows)
    torch.testing.assert_close(scales, values.abs().amax(-1, keepdim=True) / 127, rtol=0, atol=0)
    assert ((from_rows(rows) - values).abs() <= 0.501 * scales).all()
    # The largest comes back, as far as float32 can say.
    torch.testing.assert_close(from_rows(rows).abs().amax(-1), values.abs().amax(-1))


def test_a_row_of_almost_nothing_is_zeros_and_a_broken_one_nan_as_a_whole() -> None:
    values = torch.stack([torch.full((8,), 1e-35), torch.zeros(8), torch.ones(8), torch.ones(8)])
    values[2, 3], values[3, 5] = NAN, -INF
    found = from_rows(to_rows(values, INT8))
    assert (found[:2] == 0).all() and found[2:].isnan().all()


@pytest.mark.parametrize("kv_dtype", [FP8, INT8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 136])
def test_the_native_kernels_write_the_same_bytes(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int
) -> None:
    """One KV head, whose K are the special rows, and V the same in reverse order."""
    keys = special_rows(head_dim).to(dtype)
    qkv = torch.cat([torch.zeros_like(keys), keys, keys.flip(0)], 1)
    num_tokens, block_size = len(keys), 5
    ops, step = CpuOps(dtype), StepInputs(num_tokens, 1, 3)
    table, head = ops.parameter(qkv), ops.linear_weight([torch.ones(1, head_dim)])
    row = head_dim + (SCALE_BYTES if kv_dtype == INT8 else 0)
    cache = torch.full((3, 1, 2, 1, block_size, row), 77, dtype=torch.uint8).view(kv_dtype)
    ops.bind_cache(cache)
    spec = AttentionSpec(0, 1, 1, head_dim, 1.0)
    model = ops.compile(
        lambda step: ops.attention(ops.embed(table, step.token_ids), spec),
        lambda x: ops.linear(x, head),
        step,
        max_rows=1,
    )
    fill_step(step, [Chunk(list(range(num_tokens)), 0, [2, 0, 1])], block_size)
    model.forward()
    written = cache.view(torch.uint8)[[2, 0, 1], 0, :, 0].transpose(0, 1).flatten(1, 2)[:, :num_tokens]
    for found, values in zip(written, (keys, keys.flip(0)), strict=True):
        expected = to_rows(values, kv_dtype)
        is_number = ~from_rows(expected).isnan().all(-1)
        assert torch.equal(found[is_number], expected.view(torch.uint8)[is_number])
        read = from_rows(found.contiguous().view(kv_dtype))
        torch.testing.assert_close(read, from_rows(expected), rtol=0, atol=0, equal_nan=True)
