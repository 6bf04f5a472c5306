from __future__ import annotations

from typing import Any

import pytest
import torch

from alignedserve.kernels.kv_int8 import bounds_bytes, dequantise_torch, quantise_torch, stored_bytes
from alignedserve.kernels.triton.kv_int8 import dequantise, quantise
from tests.kernels.triton.harness import DEVICE, DTYPES, TOLERANCE, poison, randn

NUM_BLOCKS = 5
# Of the cache, in the order in which they are stored.
CHOSEN = [3, 0, 4]


def new_cache(dtype: torch.dtype, num_slots: int = 16, head_dim: int = 24) -> torch.Tensor:
    spread, offset = randn(1, 2, 2, 2, 1, head_dim).exp(), randn(1, 2, 2, 2, 1, head_dim)
    return (randn(NUM_BLOCKS, 2, 2, 2, num_slots, head_dim) * spread + offset).to(dtype)


def chosen() -> torch.Tensor:
    return torch.tensor(CHOSEN, dtype=torch.int64, device=DEVICE)


def new_stored(cache: torch.Tensor) -> torch.Tensor:
    return torch.full((len(CHOSEN), stored_bytes(cache)), 173, dtype=torch.uint8, device=DEVICE)


def expected(cache: torch.Tensor, num_last_slots: int) -> torch.Tensor:
    stored = new_stored(cache)
    quantise_torch(cache[CHOSEN].contiguous(), stored, num_last_slots)
    return stored


@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_slots", "head_dim"), [(16, 64), (16, 24), (5, 2), (1, 80), (300, 20)])
def test_blocks_are_stored_as_the_reference_stores_them(
    dtype: torch.dtype, num_slots: int, head_dim: int
) -> None:
    cache = new_cache(dtype, num_slots, head_dim)
    stored, wanted = new_stored(cache), expected(cache, num_slots)
    quantise(cache, chosen(), stored)
    num_bounds = bounds_bytes(cache)
    assert torch.equal(stored[:, :num_bounds], wanted[:, :num_bounds])
    apart = (stored[:, num_bounds:].int() - wanted[:, num_bounds:].int()).abs()
    # where a value is as far from one code as from the next
    assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01


@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_slots", "head_dim"), [(16, 64), (5, 2), (300, 20)])
def test_blocks_come_back_as_the_reference_restores_them(
    dtype: torch.dtype, num_slots: int, head_dim: int
) -> None:
    cache = new_cache(dtype, num_slots, head_dim)
    stored = expected(cache, num_slots)
    target = poison(*cache.shape, dtype=dtype)
    dequantise(stored, target, chosen())
    wanted = torch.empty_like(cache[CHOSEN])
    dequantise_torch(stored, wanted)
    torch.testing.assert_close(
        target[CHOSEN].double(), wanted.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    others = [block for block in range(NUM_BLOCKS) if block not in CHOSEN]
    assert target[others].isnan().all()


@pytest.mark.parametrize("num_slots", [1, 7, 16])
def test_of_the_tail_only_what_is_filled_counts(num_slots: int) -> None:
    cache = new_cache(torch.float32)
    wanted = expected(cache, num_slots)
    cache[CHOSEN[-1], ..., num_slots:, :] = float("nan")
    stored = new_stored(cache)
    quantise(cache, chosen(), stored, tail=2, num_tail_slots=num_slots)
    apart = (stored.int() - wanted.int()).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01
    unfilled = stored[2, bounds_bytes(cache) :].view(cache.shape[1:])[..., num_slots:, :]
    assert not unfilled.any()


def test_constant_and_broken_channels() -> None:
    cache = new_cache(torch.float32)
    cache[3, 0, 0, 0, :, 0] = -2.5
    cache[3, 1, 1, 1, 4, 5] = float("nan")
    cache[0, 1, 0, 1, 2, 3] = float("inf")
    cache[4, 0, 1, 0, :, 7] = torch.tensor([3e38, -3e38] * 8)
    stored = new_stored(cache)
    quantise(cache, chosen(), stored)
    back = torch.zeros_like(cache)
    dequantise(stored, back, chosen())
    assert (back[3, 0, 0, 0, :, 0] == -2.5).all()
    is_broken = torch.zeros_like(cache, dtype=torch.bool)
    is_broken[3, 1, 1, 1, :, 5] = is_broken[0, 1, 0, 1, :, 3] = is_broken[4, 0, 1, 0, :, 7] = True
    assert torch.equal(back.isnan(), is_broken)


def test_what_came_back_is_stored_as_the_same_bytes() -> None:
    cache = new_cache(torch.float32)
    first, again = new_stored(cache), new_stored(cache)
    quantise(cache, chosen(), first, tail=2, num_tail_slots=9)
    dequantise(first, cache, chosen())
    quantise(cache, chosen(), again, tail=2, num_tail_slots=9)
    assert torch.equal(first, again)


def test_nothing_to_store() -> None:
    cache = new_cache(torch.float32)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    stored = torch.zeros(0, stored_bytes(cache), dtype=torch.uint8, device=DEVICE)
    before = cache.clone()
    quantise(cache, none, stored)
    dequantise(stored, cache, none)
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cache", dict(cache=torch.zeros(3, 2, 2, 4, 8))),
        ("cache", dict(cache=torch.zeros(3, 4, 2, 1, 4, 8)[:, ::2])),
        ("blocks", dict(blocks=torch.zeros(2, dtype=torch.int32))),
        ("stored", dict(stored=torch.zeros(2, 383, dtype=torch.uint8))),
        ("stored", dict(stored=torch.zeros(3, 384, dtype=torch.uint8))),
        ("num_tail_slots", dict(num_tail_slots=0)),
        ("num_tail_slots", dict(num_tail_slots=5)),
    ],
)
def test_wrong_arguments_are_named(name: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = dict(
        cache=torch.zeros(3, 2, 2, 1, 4, 8),
        blocks=torch.zeros(2, dtype=torch.int64),
        stored=torch.zeros(2, 384, dtype=torch.uint8),
    )
    with pytest.raises(ValueError, match=f"^{name} must"):
        quantise(**{**arguments, **change})
