from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.transport.runs import MAX_PIECE_BYTES, Run, Tail, check_blocks, merge, pieces_of, tail_of
from alignedserve.types import PoolBlockId
from tests.transport.helpers import pairs as pairs_of

MIB = 1 << 20


def expand(runs: list[Run]) -> list[tuple[int, int]]:
    return [(here + i, there + i) for here, there, count in runs for i in range(count)]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=40), st.sampled_from([1, MIB, 7 * MIB])
)
def test_runs_are_the_pairs_in_order_and_no_two_could_be_one(
    pairs: list[tuple[int, int]], block_bytes: int
) -> None:
    runs = merge(pairs, block_bytes)
    assert expand(runs) == pairs
    for before, after in pairwise(runs):
        joins = (after.here, after.there) == (
            before.here + before.num_blocks,
            before.there + before.num_blocks,
        )
        assert not joins or (before.num_blocks + 1) * block_bytes > MAX_PIECE_BYTES


def test_blocks_that_follow_each_other_at_both_ends_are_one_run() -> None:
    assert merge([(3, 8), (4, 9), (5, 10), (6, 12), (7, 13)], 1024) == [Run(3, 8, 3), Run(6, 12, 2)]


def test_a_run_is_cut_at_the_largest_piece() -> None:
    assert [run.num_blocks for run in merge([(i, i) for i in range(40)], MIB)] == [16, 16, 8]
    assert [run.num_blocks for run in merge([(0, 0), (1, 1)], 2 * MAX_PIECE_BYTES)] == [1, 1]


def test_a_block_that_does_not_exist_is_named() -> None:
    check_blocks([0, 4], 5, "the pool")
    with pytest.raises(RuntimeError, match="block 5 of the pool, which has 5"):
        check_blocks([0, 5], 5, "the pool")
    with pytest.raises(RuntimeError, match="block -1"):
        check_blocks([-1], 5, "the pool")


def test_the_tail_is_the_last_column_unless_it_is_full() -> None:
    assert tail_of(pairs_of((1, 5), (2, 7)), 7, 8) == Tail(PoolBlockId(7), 1, 1)
    assert tail_of(pairs_of((1, 5), (2, 7)), 3, 8, num_groups=3) == Tail(PoolBlockId(6), 3, 5)
    assert tail_of(pairs_of((1, 5), (2, 7)), 0, 8) is None
    assert tail_of([], 0, 8) is None
    for places, num_empty in ((pairs_of((1, 5)), 8), (pairs_of((1, 5)), -1), ([], 1)):
        with pytest.raises(RuntimeError, match=f"{len(places)} blocks of 8 slots, .* {num_empty} are empty"):
            tail_of(places, num_empty, 8)


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 12), st.integers(1, 4))
def test_a_run_is_cut_into_what_is_full_and_the_blocks_of_the_tail(
    there: int, num_blocks: int, first: int, num_groups: int
) -> None:
    run, tail = Run(100 + there, there, num_blocks), Tail(PoolBlockId(first), num_groups, 3)
    pieces = [*pieces_of(run, tail)]
    assert expand([piece for piece, _ in pieces]) == expand([run])
    for piece, is_tail in pieces:
        assert not is_tail or piece.num_blocks == 1
        assert {tail.has(block) for _, block in expand([piece])} == {is_tail}
    assert sum(not is_tail for _, is_tail in pieces) <= 2
    assert [*pieces_of(run, None)] == [(run, False)]
