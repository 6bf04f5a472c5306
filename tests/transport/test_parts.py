"""Blocks of several ranks: a part of each, in memory of its own, and one block in the pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels.kv_int8 import dequantise_torch, quantise_torch
from alignedserve.kv.format import BlockFormat
from alignedserve.transport.completions import Completions
from alignedserve.transport.copiers import ALONE_BYTES, DIRECTIONS
from alignedserve.transport.kv_receiver import KVReceiver
from alignedserve.transport.kv_sender import KVSender
from alignedserve.transport.mover import Mover, PoolBlocks, make_copier
from alignedserve.transport.runs import Run
from alignedserve.transport.staging_buffer import StagingBuffer
from alignedserve.types import Epoch, InstanceId
from tests.transport.helpers import (
    KEY,
    Outcomes,
    block_ids,
    bytes_of,
    empty_blocks,
    equal_blocks,
    filled_blocks,
    identity,
    leaving_no_thread,
    pairs,
)

NUM_BLOCKS, NUM_POOL_BLOCKS, BLOCK_BYTES = 6, 9, 1024
FORM = BlockFormat(num_layers=2, block_size=8, num_kv_heads=2, head_dim=24, dtype="bfloat16", num_ranks=2)
Places = list[tuple[int, int]]


def moved(
    what: str, places: Places, parts: Sequence[torch.Tensor], pool: np.ndarray, form: BlockFormat
) -> None:
    """Saves or loads full blocks."""
    completions, outcomes = Completions(), Outcomes()
    with closing(Mover(parts, PoolBlocks(pool, form), Epoch(1), completions)) as mover:
        if what == "save":
            mover.save(KEY, pairs(*places), outcomes.append)
        else:
            mover.load(KEY, pairs(*places), outcomes.append)
        assert completions.run(timeout_s=30) == 1
    assert outcomes.errors == [None]


some_places = st.lists(
    st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_POOL_BLOCKS - 1)),
    unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
    min_size=1,
    max_size=NUM_BLOCKS,
)


@settings(max_examples=30, deadline=None)
@given(some_places, st.integers(2, 4))
def test_a_block_of_the_pool_has_one_rank_s_part_after_another(places: Places, num_ranks: int) -> None:
    parts = [filled_blocks(NUM_BLOCKS, BLOCK_BYTES, seed) for seed in range(num_ranks)]
    pool = bytes_of(filled_blocks(NUM_POOL_BLOCKS, num_ranks * BLOCK_BYTES, seed=9)).copy()
    expected = pool.copy()
    for here, there in places:
        expected[there] = np.concatenate([bytes_of(part)[here] for part in parts])
    form = replace(FORM, num_ranks=num_ranks)
    with leaving_no_thread():
        moved("save", places, parts, pool, form)
        assert np.array_equal(pool, expected)

        back = [filled_blocks(NUM_BLOCKS, BLOCK_BYTES, seed=20 + seed) for seed in range(num_ranks)]
        before = [bytes_of(part).copy() for part in back]
        moved("load", places, back, pool, form)
    filled = {here for here, _ in places}
    for part, old, new in zip(parts, before, back, strict=True):
        for block in range(NUM_BLOCKS):
            assert np.array_equal(bytes_of(new)[block], (bytes_of(part) if block in filled else old)[block])


@pytest.mark.parametrize("encoding", ["kv", "kv-int8"])
def test_a_small_copy_is_made_by_the_thread_that_starts_it(encoding: str) -> None:
    form = replace(FORM, encoding=encoding)
    num_alone = ALONE_BYTES // form.block_bytes
    parts = [torch.zeros((num_alone + 1, *FORM.shape), dtype=torch.bfloat16) for _ in range(2)]
    pool = np.zeros((num_alone + 1, form.block_bytes), np.uint8)
    seen: set[threading.Thread] = set()

    def is_stopped() -> bool:
        seen.add(threading.current_thread())
        return False

    with leaving_no_thread(), closing(make_copier(parts, PoolBlocks(pool, form))) as copier:
        for direction in DIRECTIONS:
            copier.copy(direction, [Run(0, 0, num_alone)], None, is_stopped)
        assert seen == {threading.current_thread()}
        seen.clear()
        copier.copy("save", [Run(0, 0, num_alone + 1)], None, is_stopped)
        assert seen and threading.current_thread() not in seen


def test_each_rank_s_part_is_quantised_by_itself() -> None:
    noise = torch.Generator().manual_seed(0)
    parts = [torch.randn((NUM_BLOCKS, *FORM.shape), generator=noise).bfloat16() for _ in range(2)]
    stored = FORM.in_pool("int8")
    pool, places = np.full((NUM_POOL_BLOCKS, stored.block_bytes), 99, np.uint8), [(1, 4), (2, 5), (5, 0)]
    expected = torch.from_numpy(pool.copy())
    for number, part in enumerate(parts):
        own = slice(number * stored.block_bytes // 2, (number + 1) * stored.block_bytes // 2)
        for here, there in places:
            quantised = torch.empty(1, stored.block_bytes // 2, dtype=torch.uint8)
            quantise_torch(part[here : here + 1], quantised, FORM.block_size)
            expected[there, own] = quantised[0]
    moved("save", places, parts, pool, stored)
    assert np.array_equal(pool, expected.numpy())

    back = [torch.zeros_like(part) for part in parts]
    moved("load", places, back, pool, stored)
    for number, part in enumerate(back):
        own = slice(number * stored.block_bytes // 2, (number + 1) * stored.block_bytes // 2)
        for here, there in places:
            restored = torch.empty(1, *FORM.shape, dtype=torch.bfloat16)
            dequantise_torch(expected[there : there + 1, own].contiguous(), restored)
            assert torch.equal(part[here], restored[0])


@pytest.mark.parametrize("transport", ["gloo", "ipc"])
def test_all_parts_are_pulled(transport: str) -> None:
    theirs = [filled_blocks(12, BLOCK_BYTES, seed, transport=transport) for seed in (1, 2)]
    ours = [empty_blocks(20, BLOCK_BYTES) for _ in range(2)]
    assert pull(transport, theirs, ours) is None
    for source, target in zip(theirs, ours, strict=True):
        assert equal_blocks(target, [0, 1, 7], source, [3, 4, 9])
        others = sorted(set(range(20)) - {0, 1, 7})
        assert not target[others].view(torch.uint8).any()


def test_instances_of_different_numbers_of_ranks_do_not_map_each_other() -> None:
    theirs = [filled_blocks(12, BLOCK_BYTES, seed=1, transport="ipc")]
    error = pull("ipc", theirs, [empty_blocks(20, BLOCK_BYTES // 2) for _ in range(2)])
    assert error is not None and "the sender has the memories of 1 ranks, those to fill are of 2" in error


def pull(transport: str, theirs: Sequence[torch.Tensor], ours: Sequence[torch.Tensor]) -> str | None:
    """Pulls blocks 3, 4 and 9 into 0, 1 and 7. Returns the outcome's error."""
    completions, outcomes, staged = Completions(), Outcomes(), Outcomes()
    staging_buffer = StagingBuffer(Epoch(1), completions)
    staging_buffer.put(KEY, block_ids(3, 4, 9), staged.append)
    with leaving_no_thread(), ExitStack() as open_things:
        sender = KVSender(transport, theirs, staging_buffer, identity("prefill-0"))
        open_things.callback(sender.close)
        receiver = KVReceiver(transport, ours, identity("decode-0"), completions)
        open_things.callback(receiver.close)
        specs = [(KEY, block_ids(0, 1, 7))]
        receiver.pull(InstanceId("prefill-0"), sender.address, specs, outcomes.append, 30.0)
        while not outcomes:
            assert completions.run(timeout_s=60)
    staging_buffer.clear()
    return outcomes[0].error
