from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kv.format import BlockFormat
from alignedserve.transport.completions import Completions, Outcome, TransferId
from alignedserve.transport.copiers import GROUP_BYTES, HostCopier, groups
from alignedserve.transport.mover import Mover, PoolBlocks
from alignedserve.transport.runs import MAX_PIECE_BYTES, Run
from alignedserve.types import Epoch, RequestKey
from tests.transport.helpers import KEY, Outcomes, bytes_of, empty_blocks, filled_blocks, pairs, until

NUM_BLOCKS, NUM_POOL_BLOCKS, BLOCK_BYTES = 8, 12, 1024
EPOCH = Epoch(3)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def completions() -> Completions:
    return Completions()


@pytest.fixture
def outcomes() -> Outcomes:
    return Outcomes()


@pytest.fixture
def cache() -> torch.Tensor:
    return filled_blocks(NUM_BLOCKS, BLOCK_BYTES, seed=1)


@pytest.fixture
def pool() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return bytes_of(filled_blocks(NUM_POOL_BLOCKS, BLOCK_BYTES, seed=2))


@pytest.fixture
def mover(
    cache: torch.Tensor, pool: np.ndarray[tuple[int, int], np.dtype[np.uint8]], completions: Completions
) -> Iterator[Mover]:
    others = set(threading.enumerate())
    mover = Mover([cache], PoolBlocks(pool), EPOCH, completions)
    yield mover
    mover.close()
    assert not mover.num_pending
    assert not any(thread.name.startswith("mover") for thread in set(threading.enumerate()) - others)


some_pairs = st.lists(
    st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_POOL_BLOCKS - 1)),
    unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
    max_size=NUM_BLOCKS,
)


@settings(max_examples=50, deadline=None)
@given(some_pairs, some_pairs)
def test_what_is_saved_and_loaded_arrives_and_nothing_else_changes(
    saved: list[tuple[int, int]], loaded: list[tuple[int, int]]
) -> None:
    cache = filled_blocks(NUM_BLOCKS, BLOCK_BYTES, seed=1)
    pool = bytes_of(filled_blocks(NUM_POOL_BLOCKS, BLOCK_BYTES, seed=2)).copy()
    expected_cache, expected_pool = bytes_of(cache).copy(), pool.copy()
    for here, there in saved:
        expected_pool[there] = expected_cache[here]
    for here, there in loaded:
        expected_cache[here] = expected_pool[there]

    completions, outcomes = Completions(), Outcomes()
    mover = Mover([cache], PoolBlocks(pool), EPOCH, completions)
    mover.save(KEY, pairs(*saved), outcomes.append)
    mover.load(KEY, pairs(*loaded), outcomes.append)
    while len(outcomes) < 2:
        assert completions.run(timeout_s=30)
    mover.close()

    assert outcomes.errors == [None, None]
    assert np.array_equal(bytes_of(cache), expected_cache)
    assert np.array_equal(pool, expected_pool)


def test_a_cache_of_the_engine_s_shape_moves_as_it_is(completions: Completions, outcomes: Outcomes) -> None:
    form = BlockFormat(num_layers=2, block_size=16, num_kv_heads=2, head_dim=8, dtype="float32")
    cache = torch.rand((4, *form.shape))
    pool = np.zeros((4, form.block_bytes), np.uint8)
    mover = Mover([cache], PoolBlocks(pool), EPOCH, completions)
    mover.save(KEY, pairs((1, 3), (2, 0)), outcomes.append)
    assert completions.run(timeout_s=30) == 1
    mover.close()
    assert outcomes.errors == [None]
    assert torch.equal(torch.from_numpy(pool[3]).view(torch.float32).view(form.shape), cache[1])
    assert torch.equal(torch.from_numpy(pool[0]).view(torch.float32).view(form.shape), cache[2])


def test_an_outcome_names_its_transfer_and_comes_in_the_loop_s_thread(
    mover: Mover, completions: Completions
) -> None:
    seen: list[tuple[Outcome, threading.Thread]] = []

    def note(outcome: Outcome) -> None:
        seen.append((outcome, threading.current_thread()))

    first = mover.save(KEY, pairs((0, 0)), note)
    second = mover.load(RequestKey(8), [], note)
    assert (first, second) == (TransferId(EPOCH, 1), TransferId(EPOCH, 2))
    while len(seen) < 2:
        assert completions.run(timeout_s=30)
    assert [outcome for outcome, _ in seen] == [
        Outcome(first, "save", (KEY,)),
        Outcome(second, "load", (RequestKey(8),)),
    ]
    assert {thread for _, thread in seen} == {threading.current_thread()}


def test_a_waiting_loop_is_woken() -> None:
    woken = threading.Event()
    completions, outcomes = Completions(wake=woken.set), Outcomes()
    mover = Mover([empty_blocks(1, 64)], PoolBlocks(np.zeros((1, 64), np.uint8)), EPOCH, completions)
    mover.save(KEY, pairs((0, 0)), outcomes.append)
    assert woken.wait(30)
    assert completions.run() == 1
    mover.close()


def test_a_transfer_past_its_deadline_writes_nothing(
    cache: torch.Tensor,
    pool: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
    completions: Completions,
    outcomes: Outcomes,
) -> None:
    clock = Clock()
    mover = Mover([cache], PoolBlocks(pool), EPOCH, completions, clock)
    before = pool.copy()
    mover.save(KEY, pairs((0, 0)), outcomes.append, timeout_s=0.0)
    assert completions.run(timeout_s=30) == 1
    assert outcomes.errors == ["its deadline passed"]
    assert np.array_equal(pool, before)

    mover.save(KEY, pairs((0, 0)), outcomes.append, timeout_s=5.0)
    assert completions.run(timeout_s=30) == 1
    assert outcomes.errors[1] is None
    mover.close()


class Tick:
    """A second passes whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_deadline_stops_a_transfer_between_two_pieces(completions: Completions, outcomes: Outcomes) -> None:
    cache = filled_blocks(6, 64, seed=1)
    pool = np.zeros((12, 64), np.uint8)
    mover = Mover([cache], PoolBlocks(pool), EPOCH, completions, Tick(), num_threads=1)
    mover.save(KEY, pairs(*((i, 2 * i) for i in range(6))), outcomes.append, timeout_s=3.5)
    assert completions.run(timeout_s=30) == 1
    mover.close()
    assert outcomes.errors == ["its deadline passed"]
    assert [bool(pool[2 * i].any()) for i in range(6)] == [True, True, True, False, False, False]


def held_mover(completions: Completions, outcomes: Outcomes) -> tuple[Mover, threading.Event]:
    """Its thread stands still in the first transfer, of request 1, until the event is set."""
    reached, go_on = threading.Event(), threading.Event()

    def clock() -> float:
        if threading.current_thread().name.startswith("mover") and not go_on.is_set():
            reached.set()
            assert go_on.wait(30)
        return 0.0

    mover = Mover(
        [filled_blocks(4, 64, seed=1)], PoolBlocks(np.zeros((4, 64), np.uint8)), EPOCH, completions, clock
    )
    mover.save(RequestKey(1), pairs((0, 0)), outcomes.append)
    assert reached.wait(30)
    return mover, go_on


def test_abandoned_transfers_are_reported_as_such_and_no_others(
    completions: Completions, outcomes: Outcomes
) -> None:
    mover, go_on = held_mover(completions, outcomes)
    mover.save(KEY, pairs((1, 1)), outcomes.append)
    mover.save(RequestKey(9), pairs((2, 2)), outcomes.append)
    mover.load(KEY, pairs((1, 1)), outcomes.append)
    mover.abandon(KEY)
    mover.abandon(KEY)
    go_on.set()
    while len(outcomes) < 4:
        assert completions.run(timeout_s=30)
    mover.close()
    assert outcomes.errors == [None, "abandoned", None, "abandoned"]


def test_closing_reports_what_did_not_happen(completions: Completions, outcomes: Outcomes) -> None:
    mover, go_on = held_mover(completions, outcomes)
    mover.save(KEY, pairs((1, 1)), outcomes.append)
    closing = threading.Thread(target=mover.close)
    closing.start()
    until(lambda: mover._is_closed, 30)
    go_on.set()
    closing.join(30)
    assert not closing.is_alive()
    completions.run()
    assert outcomes.errors == ["the mover was closed"] * 2
    with pytest.raises(RuntimeError, match="the mover is closed"):
        mover.save(KEY, pairs((1, 1)), outcomes.append)
    mover.close()


def test_a_copy_that_fails_is_reported_and_the_next_one_runs(
    completions: Completions, outcomes: Outcomes
) -> None:
    pool = np.zeros((4, 64), np.uint8)
    pool.flags.writeable = False
    mover = Mover([filled_blocks(4, 64, seed=1)], PoolBlocks(pool), EPOCH, completions)
    mover.save(KEY, pairs((0, 0)), outcomes.append)
    mover.load(KEY, pairs((0, 0)), outcomes.append)
    while len(outcomes) < 2:
        assert completions.run(timeout_s=30)
    mover.close()
    assert outcomes.errors[0] is not None and "ValueError" in outcomes.errors[0]
    assert outcomes.errors[1] is None


def test_blocks_that_do_not_exist_are_an_error_at_once(mover: Mover, outcomes: Outcomes) -> None:
    with pytest.raises(RuntimeError, match="block 8 of the KV cache, which has 8"):
        mover.save(KEY, pairs((8, 0)), outcomes.append)
    with pytest.raises(RuntimeError, match="block 12 of the pool, which has 12"):
        mover.load(KEY, pairs((0, 12)), outcomes.append)


def test_a_pool_of_another_block_size_is_an_error(completions: Completions) -> None:
    with pytest.raises(
        RuntimeError, match="blocks of 64 bytes in the cache, of shape \\(128,\\) in the pool"
    ):
        Mover([empty_blocks(1, 64)], PoolBlocks(np.zeros((1, 128), np.uint8)), EPOCH, completions)


@given(st.lists(st.integers(1, 16), max_size=40), st.sampled_from([1 << 10, 1 << 20, 12 << 20]))
def test_groups_hold_every_run_once_and_no_more_than_they_should(sizes: list[int], block_bytes: int) -> None:
    runs = [Run(index, index, size) for index, size in enumerate(sizes)]
    found = list(groups(runs, block_bytes))
    assert [run for group in found for run in group] == runs
    for group in found:
        assert sum(run.num_blocks for run in group[:-1]) * block_bytes < GROUP_BYTES
    for group in found[:-1]:
        assert sum(run.num_blocks for run in group) * block_bytes >= GROUP_BYTES


def test_python_goes_on_while_bytes_are_copied() -> None:
    """With the lock held the other thread would not count at all during the copy, which takes milliseconds."""
    num_blocks = 256
    block_bytes = MAX_PIECE_BYTES // 16
    copier = HostCopier(empty_blocks(num_blocks, block_bytes), np.ones((num_blocks, block_bytes), np.uint8))
    is_copying = threading.Event()

    def copy() -> None:
        is_copying.set()
        copier.load(Run(0, 0, num_blocks))
        is_copying.clear()

    def count_during_copy() -> int:
        thread = threading.Thread(target=copy)
        thread.start()
        is_copying.wait(30)
        count = 0
        while is_copying.is_set():
            count += 1
        thread.join()
        return count

    assert max(count_during_copy() for _ in range(5)) > 1000
