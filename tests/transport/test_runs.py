from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.transport.runs import MAX_PIECE_BYTES, Run, check_blocks, merge

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
