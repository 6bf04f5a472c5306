"""Blocks are counted here token by token, from the tokens that each token attends to."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kv.groups import STATE_WINDOW
from alignedserve.kv.span import TILE_TOKENS, KvSpan

GROUPS = st.sampled_from([(0, 1), (1, 1), (1, 5), (4, 3)])
SPANS = st.builds(
    lambda block_size, window, max_step, groups, tile: KvSpan(
        block_size, window, max_step, groups[0], groups[1], tile
    ),
    st.sampled_from([4, 8, 16, 32]),
    st.sampled_from([1, 5, 16, 24, 64, 100, 512]),
    st.sampled_from([1, 2, 7, 16, 100]),
    GROUPS,
    st.sampled_from([TILE_TOKENS, TILE_TOKENS, 1, 4, 16]),
)
SPANS |= st.builds(
    lambda block_size, max_step, groups: KvSpan(
        block_size, STATE_WINDOW, max_step, groups[0], groups[1], tile_tokens=1, has_state=True
    ),
    st.sampled_from([4, 16]),
    st.sampled_from([1, 7, 100]),
    GROUPS,
)
ALL = st.sampled_from([KvSpan(16), KvSpan(4, max_step=7), KvSpan(16, window=24), KvSpan(16, 24, 0, 1, 2)])


def held(span: KvSpan, num_cached: int, num_tokens: int) -> list[set[int]]:
    """The columns of which a request has a block, of each group."""
    num_passed, num_columns = span.num_passed(num_cached), span.num_columns(num_tokens)
    end, are_held = span.end(num_passed, num_columns), span.are_held(0, num_columns, num_passed)
    return [
        {
            column
            for column, is_held in enumerate(are_held[group :: span.num_groups])
            if is_held and (is_full or column < end)
        }
        for group in range(span.num_groups)
        for is_full in [group < span.num_full_groups]
    ]


def seen(window: int, token: int) -> range:
    """The tokens that this one attends to, itself included, where there is such a window."""
    return range(max(token + 1 - window, 0) if window else 0, token + 1)


@settings(max_examples=300, deadline=None)
@given(SPANS | ALL, st.integers(0, 700), st.data())
def test_all_that_the_next_tokens_attend_to_is_held(
    span: KvSpan, num_cached: int, data: st.DataObject
) -> None:
    num_tokens = data.draw(st.integers(num_cached + 1, num_cached + 300), label="num_tokens")
    in_groups = held(span, num_cached, num_tokens)
    next_tokens = range(num_cached, min(num_tokens, num_cached + (span.max_step or num_tokens)))
    for group, columns in enumerate(in_groups):
        window = span.window if group >= span.num_full_groups else 0
        needed = {each // span.block_size for token in next_tokens for each in seen(window, token)}
        assert needed <= columns
        assert group >= span.num_full_groups or columns == set(range(span.num_columns(num_tokens)))
    assert span.num_held(num_cached, num_tokens) == sum(map(len, in_groups))


@settings(max_examples=300, deadline=None)
@given(SPANS | ALL, st.integers(0, 700), st.integers(1, 700))
def test_what_is_usable_has_all_that_the_next_token_attends_to(
    span: KvSpan, num_saved: int, num_tokens: int
) -> None:
    num_usable = span.num_usable(num_saved, num_tokens)
    assert num_usable in ((0, num_saved) if span.has_state else (0, min(num_saved, num_tokens - 1)))
    if num_usable:
        saved = range(span.num_passed(num_saved), span.num_columns(num_saved))
        assert {token // span.block_size for token in seen(span.window, num_usable)[:-1]} <= set(saved)
    if num_saved < num_tokens or not span.window:
        assert num_usable == min(num_saved, num_tokens - 1)


@settings(max_examples=200, deadline=None)
@given(SPANS | ALL, st.integers(0, 700))
def test_what_lasts_is_not_in_a_column_in_which_more_is_saved(span: KvSpan, num_saved: int) -> None:
    num_lasting = span.num_lasting(num_saved)
    assert num_lasting in ((0, num_saved) if span.has_state else (num_saved,))
    if span.has_state and num_lasting:
        assert (num_lasting - 1) // span.block_size < num_saved // span.block_size


@settings(max_examples=200, deadline=None)
@given(SPANS, st.integers(0, 900))
def test_what_is_passed_is_no_more_than_a_tile_and_a_column_behind(span: KvSpan, num_cached: int) -> None:
    first_needed = seen(span.window, num_cached)[0]
    num_behind = first_needed - span.num_passed(num_cached) * span.block_size
    assert first_needed % span.tile_tokens <= num_behind < span.tile_tokens + span.block_size


@settings(max_examples=200, deadline=None)
@given(SPANS | ALL, st.integers(1, 900), st.integers(0, 900))
def test_no_request_ever_holds_more_than_at_most(span: KvSpan, num_tokens: int, num_cached: int) -> None:
    most = span.num_at_most(span.num_columns(num_tokens))
    assert span.num_held(min(num_cached, num_tokens - 1), num_tokens) <= most
    assert span.num_held(0, num_tokens) == most
    assert most <= span.num_groups * span.num_columns(num_tokens)


@settings(max_examples=300, deadline=None)
@given(SPANS | ALL, st.integers(0, 1500))
def test_the_longest_is_the_one_that_just_fits(span: KvSpan, num_blocks: int) -> None:
    longest = span.longest(num_blocks)
    assert span.num_at_most(longest) <= num_blocks
    if longest < sys.maxsize:
        assert span.num_at_most(longest + 1) > num_blocks
    assert (longest == sys.maxsize) <= (span.window > 0 and not span.num_full_groups)


def test_of_any_columns_those_are_held_that_are_not_passed() -> None:
    span = KvSpan(16, 24, 0, num_full_groups=1, num_sliding_groups=2)
    one, both = [True, False, False], [True, True, True]
    assert span.are_held(3, 6, num_passed=0) == span.are_held(3, 6, num_passed=3) == 3 * both
    assert span.are_held(3, 6, num_passed=5) == 2 * one + both
    assert span.are_held(3, 6, num_passed=9) == 3 * one and span.are_held(3, 3, num_passed=9) == []


def test_counts_of_a_request_that_slides_in_some_layers() -> None:
    """Of 1000 tokens in 63 columns, two groups attend to all and three to 100."""
    span = KvSpan(16, window=100, max_step=1, num_full_groups=2, num_sliding_groups=3)
    # The next token attends to 901 .. 1000; its tile begins with 896.
    assert span.num_passed(1000) == 896 // 16
    assert span.num_held(1000, 1001) == 2 * 63 + 3 * (63 - 56)
    assert span.most == -(-(100 + 62 + 1) // 16) + 1 == 12
    assert span.num_at_most(63) == 2 * 63 + 3 * 12
    assert span.longest(2 * 63 + 3 * 12) == 63 and span.longest(2 * 63 + 3 * 12 - 1) == 62
    assert span.longest(59) == 11


@pytest.mark.parametrize("window", [0, 24])
def test_one_group_counts_columns(window: int) -> None:
    span = KvSpan(16, window)
    assert span.num_groups == 1
    assert span.num_blocks(2, 9) == 7 and span.num_at_most(9) == 9 and span.longest(9) == 9
