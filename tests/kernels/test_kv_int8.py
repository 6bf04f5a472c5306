from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels.cpu import kv_int8 as native
from alignedserve.kernels.kv_int8 import (
    LEAST_SPAN,
    bounds_bytes,
    dequantise_torch,
    quantise_torch,
    stored_bytes,
)
from alignedserve.kv.format import BlockFormat

NATIVE = [torch.float32, torch.bfloat16]
WAYS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "torch": (quantise_torch, dequantise_torch),
    "native": (native.quantise, native.dequantise),
}
CASES = [
    *(("torch", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *(("native", dtype) for dtype in NATIVE),
]
every_way = pytest.mark.parametrize(("way", "dtype"), CASES)


def new_kv(
    dtype: torch.dtype, num_blocks: int = 3, num_slots: int = 16, head_dim: int = 24, seed: int = 0
) -> torch.Tensor:
    """Channels as models have them: each with a range and an offset of its own."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    spread, offset = noise(1, 2, 2, 2, 1, head_dim).exp(), 4 * noise(1, 2, 2, 2, 1, head_dim)
    return (noise(num_blocks, 2, 2, 2, num_slots, head_dim) * spread + offset).to(dtype)


def stored(way: str, kv: torch.Tensor, num_last_slots: int | None = None) -> torch.Tensor:
    """On what was there before, of which nothing may be left."""
    out = torch.full((len(kv), stored_bytes(kv)), 173, dtype=torch.uint8)
    WAYS[way][0](kv, out, num_last_slots or kv.shape[4])
    return out


def restored(way: str, found: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(like, torch.nan)
    WAYS[way][1](found, out)
    return out


def assert_within_half_a_scale(kv: torch.Tensor, back: torch.Tensor) -> None:
    x, y = kv.double(), back.double()
    scale = (x.amax(4, keepdim=True) - x.amin(4, keepdim=True)) / 255
    # of the result's own rounding, and of float32's on the way
    rounding = torch.finfo(kv.dtype).eps / 2 * y.abs() + torch.finfo(kv.dtype).tiny
    slack = 1e-4 * scale + 1e-6 * x.abs().amax(4, keepdim=True)
    assert ((x - y).abs() <= scale / 2 + rounding + slack).all()


@every_way
@pytest.mark.parametrize("head_dim", [1, 8, 24, 64])
@pytest.mark.parametrize("num_slots", [1, 16, 5])
def test_a_value_comes_back_within_half_a_scale(
    way: str, dtype: torch.dtype, head_dim: int, num_slots: int
) -> None:
    kv = new_kv(dtype, num_slots=num_slots, head_dim=head_dim)
    assert_within_half_a_scale(kv, restored(way, stored(way, kv), kv))


@every_way
def test_the_bounds_come_back_as_they_were(way: str, dtype: torch.dtype) -> None:
    kv = new_kv(dtype)
    back = restored(way, stored(way, kv), kv)
    assert torch.equal(back.amin(4), kv.amin(4)) and torch.equal(back.amax(4), kv.amax(4))


@every_way
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_came_back_is_stored_as_the_same_bytes(
    way: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Also where the dtype has fewer values in a channel's range than there are codes."""
    seed, exponent = data.draw(st.integers(0, 2**31)), data.draw(st.integers(-12, 12))
    kv = new_kv(torch.float32, seed=seed)
    kv = ((kv - kv.mean(4, keepdim=True)) * 2.0**exponent + 4 * kv.mean(4, keepdim=True)).to(dtype)
    num_last_slots = data.draw(st.integers(1, 16))
    first = stored(way, kv, num_last_slots)
    assert torch.equal(stored(way, restored(way, first, kv), num_last_slots), first)


@every_way
@pytest.mark.parametrize("num_last_slots", [1, 3, 15])
@pytest.mark.parametrize("rest", [0.0, 1e4, float("nan"), float("-inf")])
def test_slots_that_are_not_filled_do_not_count(
    way: str, dtype: torch.dtype, num_last_slots: int, rest: float
) -> None:
    kv = new_kv(dtype)
    spoilt = kv.clone()
    spoilt[-1, ..., num_last_slots:, :] = rest
    found = stored(way, spoilt, num_last_slots)
    assert torch.equal(found, stored(way, kv, num_last_slots))
    back = restored(way, found, kv)
    assert back.isfinite().all()
    assert_within_half_a_scale(kv[:-1], back[:-1])
    assert_within_half_a_scale(kv[-1:, ..., :num_last_slots, :], back[-1:, ..., :num_last_slots, :])


@every_way
@pytest.mark.parametrize("value", [0.0, -0.0, 3.25, -1e-3])
def test_a_constant_channel_comes_back_as_it_was(way: str, dtype: torch.dtype, value: float) -> None:
    kv = torch.full((2, 1, 2, 1, 16, 8), value, dtype=dtype)
    assert torch.equal(restored(way, stored(way, kv), kv), kv)


@pytest.mark.parametrize("way", WAYS)
def test_a_zero_s_sign_is_in_no_byte(way: str) -> None:
    kv = torch.zeros(1, 1, 2, 1, 16, 8)
    negative = kv.clone()
    negative[..., ::2, :] = -0.0
    assert torch.equal(stored(way, negative), stored(way, kv))


@pytest.mark.parametrize("way", WAYS)
def test_a_channel_without_a_span_comes_back_as_its_least_value(way: str) -> None:
    kv = torch.zeros(1, 1, 2, 1, 16, 8)
    kv[..., 3, :] = LEAST_SPAN / 2
    assert torch.equal(restored(way, stored(way, kv), kv), torch.zeros_like(kv))
    kv[..., 3, :] = LEAST_SPAN
    assert torch.equal(restored(way, stored(way, kv), kv), kv)


@every_way
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("slot", [0, 7, 15])
def test_a_channel_that_is_not_finite_comes_back_as_nan(
    way: str, dtype: torch.dtype, value: float, slot: int
) -> None:
    kv = new_kv(dtype)
    expected = restored(way, stored(way, kv), kv)
    kv[1, 0, 1, 1, slot, 5] = value
    expected[1, 0, 1, 1, :, 5] = torch.nan
    assert torch.equal(restored(way, stored(way, kv), kv).nan_to_num(-77.0), expected.nan_to_num(-77.0))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", NATIVE)
def test_a_span_beyond_float32_comes_back_as_nan(way: str, dtype: torch.dtype) -> None:
    kv = torch.zeros(1, 1, 2, 1, 16, 8, dtype=dtype)
    kv[..., 0, :], kv[..., 1, :] = 3e38, -3e38
    assert restored(way, stored(way, kv), kv).isnan().all()


@pytest.mark.parametrize("dtype", NATIVE)
@pytest.mark.parametrize("head_dim", [1, 15, 16, 17, 64, 100])
@pytest.mark.parametrize("num_last_slots", [1, 11, 16])
def test_the_kernel_says_what_its_reference_says(
    dtype: torch.dtype, head_dim: int, num_last_slots: int
) -> None:
    kv = new_kv(dtype, head_dim=head_dim, seed=head_dim)
    found = stored("native", kv, num_last_slots)
    assert torch.equal(found, stored("torch", kv, num_last_slots))
    ours, theirs = restored("native", found, kv), restored("torch", found, kv)
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_format_counts_every_byte(dtype: str) -> None:
    form = BlockFormat(num_layers=2, block_size=16, num_kv_heads=2, head_dim=24, dtype=dtype).in_pool("int8")
    kv = new_kv(getattr(torch, dtype))
    assert form.block_bytes == stored_bytes(kv)
    assert bounds_bytes(kv) + kv[0].numel() == stored_bytes(kv)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("kv", dict(kv=torch.zeros(2, 1, 3, 1, 16, 8))),
        ("kv", dict(kv=torch.zeros(2, 1, 2, 1, 16, 16)[..., ::2])),
        ("stored", dict(stored=torch.zeros(2, 383, dtype=torch.uint8))),
        ("stored", dict(stored=torch.zeros(1, 384, dtype=torch.uint8))),
        ("stored", dict(stored=torch.zeros(2, 384))),
        ("num_last_slots", dict(num_last_slots=0)),
        ("num_last_slots", dict(num_last_slots=17)),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_wrong_arguments_are_named(way: str, name: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = dict(
        kv=torch.zeros(2, 1, 2, 1, 16, 8),
        stored=torch.zeros(2, 384, dtype=torch.uint8),
        num_last_slots=16,
    )
    with pytest.raises(ValueError, match=f"^{name} must"):
        WAYS[way][0](**{**arguments, **change})


def test_the_kernel_takes_no_float16() -> None:
    kv = torch.zeros(2, 1, 2, 1, 16, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match="^kv must be float32 or bfloat16"):
        native.quantise(kv, torch.zeros(2, stored_bytes(kv), dtype=torch.uint8), 16)
