from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.instance.profile.grid import MARGIN, Reach, grid, size
from alignedserve.instance.profile.points import Point
from tests.instance.profile.profiles import REACH

reaches = st.builds(
    Reach,
    max_num_seqs=st.integers(1, 300),
    max_chunk=st.integers(1, 4096),
    max_model_len=st.integers(MARGIN + 1, 10_000),
    num_kv_tokens=st.integers(1, 1_000_000),
)


@given(reaches, st.booleans())
def test_an_instance_can_run_all_of_it(reach: Reach, is_brief: bool) -> None:
    for point in grid(reach, is_brief):
        assert point.num_kv_tokens <= reach.num_kv_tokens
        assert len(point.lengths) + len(point.chunks) <= reach.max_num_seqs
        assert not point.chunks or point.num_computed <= reach.max_chunk
        assert all(1 <= length <= reach.max_model_len - MARGIN for length in point.lengths)
        for before, count in point.chunks:
            assert before >= 0 and 1 <= count <= reach.max_chunk
            assert before + count <= reach.max_model_len - MARGIN


@given(reaches, st.booleans())
def test_the_smaller_come_before_the_larger_and_none_comes_twice(reach: Reach, is_brief: bool) -> None:
    points = grid(reach, is_brief)
    assert len(set(points)) == len(points)
    assert all(size(one) <= size(other) for one, other in pairwise(points))


def test_it_reaches_from_the_least_to_the_most() -> None:
    points = grid(REACH)
    assert {1, 256} <= {len(point.lengths) for point in points if point.kind == "decode"}
    assert {1, 2048} <= {point.chunks[0][1] for point in points if point.kind == "chunk"}
    assert {point.kind for point in points} == {"decode", "chunk", "both"}
    assert any(max(point.lengths) > 20 * min(point.lengths) for point in points if point.kind == "decode")


def test_a_brief_one_is_much_smaller_and_has_both_kinds_that_a_fit_needs() -> None:
    brief = grid(REACH, is_brief=True)
    assert 3 * len(brief) < len(grid(REACH))
    assert {point.kind for point in brief} == {"decode", "chunk"}


def test_what_reaches_further_covers_what_does_not() -> None:
    small = Reach(max_num_seqs=16, max_chunk=512, max_model_len=1024, num_kv_tokens=10**9)
    assert REACH.covers(small) and not small.covers(REACH)
    assert not REACH.covers(Reach(16, 4096, 1024, 10))


def test_a_point_counts_what_it_computes_and_what_it_attends_to() -> None:
    point = Point(chunks=((100, 20),), lengths=(7, 8))
    assert (point.num_computed, point.num_kv_tokens, point.kind) == (22, 135, "both")
