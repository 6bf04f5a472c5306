from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels.kv_int8 import dequantise_torch, quantise_torch
from alignedserve.kv.format import BlockFormat
from alignedserve.transport.completions import Completions
from alignedserve.transport.copiers import ALONE_BYTES
from alignedserve.transport.int8_copiers import Int8Buffer, pairs_of
from alignedserve.transport.mover import Mover, PoolBlocks
from alignedserve.transport.runs import Run, tail_of
from alignedserve.types import Epoch
from tests.transport.helpers import KEY, Outcomes, pairs

NUM_BLOCKS, NUM_POOL_BLOCKS = 6, 9
FORM = BlockFormat(num_layers=2, block_size=8, num_kv_heads=2, head_dim=24, dtype="bfloat16")
STORED = FORM.in_pool("int8")


def new_cache(form: BlockFormat = FORM, num_blocks: int = NUM_BLOCKS, seed: int = 0) -> torch.Tensor:
    noise = torch.randn((num_blocks, *form.shape), generator=torch.Generator().manual_seed(seed))
    return noise.to(getattr(torch, form.dtype))


def new_pool(form: BlockFormat = STORED, num_blocks: int = NUM_POOL_BLOCKS) -> np.ndarray:
    return np.full((num_blocks, form.block_bytes), 99, np.uint8)


class Copies:
    """Each is over when its call returns."""

    def __init__(self, cache: torch.Tensor, pool: np.ndarray, form: BlockFormat = STORED) -> None:
        self._completions = Completions()
        self.outcomes = Outcomes()
        self.mover = Mover([cache], PoolBlocks(pool, form), Epoch(1), self._completions)

    def save(self, places: list[tuple[int, int]], num_empty: int) -> None:
        self.mover.save(KEY, pairs(*places), self.outcomes.append, num_empty=num_empty)
        assert self._completions.run(timeout_s=30) == 1

    def load(self, places: list[tuple[int, int]]) -> None:
        self.mover.load(KEY, pairs(*places), self.outcomes.append)
        assert self._completions.run(timeout_s=30) == 1


places = st.lists(
    st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_POOL_BLOCKS - 1)),
    unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
    min_size=1,
    max_size=NUM_BLOCKS,
)


@settings(max_examples=60, deadline=None)
@given(places, st.integers(1, FORM.block_size))
def test_what_is_saved_and_loaded_is_what_the_format_says(
    saved: list[tuple[int, int]], num_last_slots: int
) -> None:
    cache, pool = new_cache(), new_pool()
    # garbage where no token is
    cache[saved[-1][0], ..., num_last_slots:, :] = torch.nan
    expected = torch.from_numpy(pool.copy())
    for number, (here, there) in enumerate(saved, start=1):
        num_slots = num_last_slots if number == len(saved) else FORM.block_size
        quantise_torch(cache[here : here + 1], expected[there : there + 1], num_slots)
    copies = Copies(cache, pool)
    copies.save(saved, FORM.block_size - num_last_slots)
    assert np.array_equal(pool, expected.numpy())

    target = new_cache(seed=1)
    restored = target.clone()
    for here, there in saved:
        dequantise_torch(expected[there : there + 1], restored[here : here + 1])
    elsewhere = Copies(target, pool)
    elsewhere.load(saved)
    assert copies.outcomes.errors + elsewhere.outcomes.errors == [None, None]
    assert torch.equal(target, restored)
    copies.mover.close()
    elsewhere.mover.close()


def test_a_block_that_is_extended_is_stored_anew_as_a_whole() -> None:
    """It comes back, more tokens are computed, and it leaves again: what it had is within both scales' halves."""
    cache, pool = new_cache(), new_pool()
    copies, before = Copies(cache, pool), cache[2].clone()
    copies.save([(2, 4)], num_empty=5)
    first = pool[4].copy()
    copies.load([(2, 4)])
    copies.save([(2, 4)], num_empty=5)
    assert np.array_equal(pool[4], first)

    cache[2, ..., 3:5, :] = 5.0
    copies.save([(2, 4)], num_empty=3)
    copies.load([(2, 4)])
    after = cache[2]
    assert torch.equal(after[..., 3:5, :], torch.full_like(after[..., 3:5, :], 5.0))
    kept, was = after[..., :3, :].double(), before[..., :3, :].double()
    spans = [x.amax(-2, keepdim=True) - x.amin(-2, keepdim=True) for x in (was, after[..., :5, :].double())]
    most = sum(spans) / 255 / 2 + 2 * 2.0**-8 * was.abs()
    assert ((kept - was).abs() <= most).all()
    copies.mover.close()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_large_copy_is_shared_by_threads(dtype: str) -> None:
    form = BlockFormat(num_layers=4, block_size=16, num_kv_heads=4, head_dim=64, dtype=dtype)
    stored = form.in_pool("int8")
    num_blocks = 4 * ALONE_BYTES // stored.block_bytes
    cache, pool = new_cache(form, num_blocks), new_pool(stored, num_blocks)
    order = [(here, (7 * here + 3) % num_blocks) for here in range(num_blocks)]
    assert len({there for _, there in order}) == num_blocks
    copies = Copies(cache, pool, stored)
    copies.save(order, num_empty=6)
    expected = torch.zeros(num_blocks, stored.block_bytes, dtype=torch.uint8)
    quantise_torch(cache, expected, 10)
    assert np.array_equal(pool[[there for _, there in order]], expected.numpy())
    assert copies.outcomes.only.num_bytes == num_blocks * stored.block_bytes
    copies.mover.close()


def test_a_pool_of_another_format_is_an_error_with_both_numbers() -> None:
    with pytest.raises(
        RuntimeError, match=rf"{STORED.block_bytes} bytes when stored as int8, .*{FORM.block_bytes}"
    ):
        Mover([new_cache()], PoolBlocks(new_pool(FORM), STORED), Epoch(1), Completions())


@st.composite
def saves_of_groups(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """The number of groups, and the blocks of some columns, the last of which is whole."""
    num_groups = draw(st.integers(1, 3))
    columns = draw(st.lists(st.integers(0, 8), unique=True, min_size=1, max_size=5))
    there = [column * num_groups + group for column in columns for group in range(num_groups)]
    is_passed = [draw(st.booleans()) for _ in there[:-num_groups]] + num_groups * [False]
    there = [block for block, passed in zip(there, is_passed, strict=True) if not passed]
    if draw(st.booleans()):
        # group by group
        there.sort(key=lambda block: block % num_groups)
    first = draw(st.integers(0, 15 - len(there)))
    here = draw(st.one_of(st.just([*range(first, first + len(there))]), st.permutations(range(len(there)))))
    return num_groups, [*zip(here, there, strict=True)]


@settings(max_examples=60, deadline=None)
@given(saves_of_groups(), st.integers(1, FORM.block_size))
def test_the_last_column_has_a_block_in_part_of_each_group(
    save: tuple[int, list[tuple[int, int]]], num_last_slots: int
) -> None:
    num_groups, saved = save
    stored = replace(STORED, num_groups=num_groups)
    cache, pool = new_cache(num_blocks=15), new_pool(num_blocks=27)
    expected, last_column = torch.from_numpy(pool.copy()), saved[-1][1] // num_groups
    for here, there in saved:
        num_slots = num_last_slots if there // num_groups == last_column else FORM.block_size
        cache[here, ..., num_slots:, :] = torch.nan
        quantise_torch(cache[here : here + 1], expected[there : there + 1], num_slots)
    copies = Copies(cache, pool, stored)
    copies.save(saved, FORM.block_size - num_last_slots)
    assert copies.outcomes.errors == [None]
    assert np.array_equal(pool, expected.numpy())
    copies.mover.close()


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize("num_last_slots", [1, FORM.block_size])
def test_a_buffer_on_the_device_holds_groups_of_blocks(num_last_slots: int, num_groups: int) -> None:
    """What a GPU does between the copies, in Triton's interpreter: up to five blocks by way of a buffer for two."""
    form = BlockFormat(num_layers=2, block_size=8, num_kv_heads=2, head_dim=24, dtype="float32")
    cache, target = new_cache(form), torch.full((NUM_BLOCKS, *form.shape), torch.nan)
    first = {1: 3, 2: 4, 3: 3}[num_groups]
    in_tail = [5, 3, 4][:num_groups]
    places = pairs((0, 7), (1, 8), *zip(in_tail, range(first, first + num_groups), strict=True))
    cache[in_tail, ..., num_last_slots:, :] = torch.nan
    tail = tail_of(places, form.block_size - num_last_slots, form.block_size, num_groups)
    expected, pool = torch.from_numpy(new_pool(form.in_pool("int8"))), new_pool(form.in_pool("int8"))
    for here, there in places:
        num_slots = num_last_slots if here in in_tail else form.block_size
        quantise_torch(cache[here : here + 1], expected[there : there + 1], num_slots)

    buffer = Int8Buffer(cache, num_bytes=3 * pool.shape[1] - 1)
    assert len(buffer.stored) == 2
    back = Int8Buffer(target, num_bytes=2 * pool.shape[1])
    for first in range(0, len(places), 2):
        group = places[first : first + 2]
        buffer.quantise(group, tail)
        pool[[there for _, there in group]] = buffer.stored[: len(group)].numpy()
    apart = np.abs(pool.astype(int) - expected.numpy().astype(int))
    # where a value is as far from one code as from the next
    assert apart.max() <= 1 and (apart > 0).mean() < 0.01

    for first in range(0, len(places), 2):
        group = places[first : first + 2]
        back.stored[: len(group)] = torch.from_numpy(pool[[there for _, there in group]])
        back.dequantise(group)
    restored = torch.zeros_like(target)
    for here, there in places:
        dequantise_torch(torch.from_numpy(pool[there : there + 1]), restored[here : here + 1])
    filled = [here for here, _ in places]
    torch.testing.assert_close(target[filled], restored[filled])
    assert target[2].isnan().all()


def test_runs_are_taken_apart_in_order() -> None:
    assert pairs_of([Run(3, 7, 2), Run(0, 1, 1)]) == pairs((3, 7), (4, 8), (0, 1))
