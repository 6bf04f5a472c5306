from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

from hypothesis import example, given, settings
from hypothesis import strategies as st

from alignedserve.kv.span import KvSpan
from alignedserve.kvpool.batch_builder import BatchLimits
from alignedserve.kvpool.quadtree import LEAF_WIDTH, MAX_LENGTH, QuadTree
from alignedserve.kvpool.search import find_near, form_batch
from alignedserve.types import RequestKey
from tests.kvpool.plain_search import EVERYTHING, PlainIndex, PlainSearch, Pooled, plain_batch

HORIZON_S, STARVATION_S = 2, 5
CLOSE = st.integers(1, 150)
FAR = st.one_of(
    st.sampled_from([100, 900, 1000, 5000, 30_000]).flatmap(
        lambda middle: st.integers(middle - 40, middle + 40)
    ),
    st.integers(1, MAX_LENGTH + 40_000),
)
ARRIVALS = st.one_of(
    st.lists(st.tuples(CLOSE, st.integers(0, 60)), max_size=30),
    st.lists(st.tuples(st.one_of(CLOSE, FAR), st.integers(0, 60)), max_size=30),
)
BLOCK_SIZES = st.sampled_from([4, 16, 32])
# Windows, in tokens, and numbers of full and of sliding groups.
GROUPS = st.sampled_from([(0, 1), (1, 1), (1, 5), (4, 3)])
SPANS = st.builds(
    lambda window, groups: (window, *groups), st.sampled_from([1, 5, 40, 600]), GROUPS
) | st.just((0, 0, 1))


@st.composite
def any_limits(draw: st.DrawFn) -> BatchLimits:
    max_blocks = draw(st.one_of(st.integers(0, 40), st.integers(0, 20_000)))
    return BatchLimits(max_blocks, draw(st.integers(0, 14)), draw(st.integers(0, 9)))


@dataclass
class Both:
    """The tree, and the same requests in a plain list."""

    block_size: int
    window: int = 0
    num_full: int = 0
    num_sliding: int = 1
    tree: QuadTree = field(init=False)
    plain: PlainIndex = field(init=False)
    num_inserted: int = 0

    def __post_init__(self) -> None:
        span = KvSpan(self.block_size, self.window, 1, self.num_full, self.num_sliding)
        self.tree = QuadTree(span)
        max_columns = span.most if self.window else None
        self.plain = PlainIndex(self.block_size, self.num_full, self.num_sliding, max_columns)

    def insert(self, length: int, due_s: float = math.inf, now: float = 0) -> RequestKey:
        self.num_inserted += 1
        key = RequestKey(self.num_inserted)
        self.tree.insert(key, length, due_s, now)
        self.plain.insert(key, length, due_s, now)
        return key

    def of(self, keys: list[RequestKey]) -> list[Pooled]:
        return [self.plain.pooled[key] for key in keys]


def filled(
    arrivals: list[tuple[int, int]],
    block_size: int,
    window: int = 0,
    num_full: int = 0,
    num_sliding: int = 1,
) -> Both:
    both = Both(block_size, window, num_full, num_sliding)
    for length, due_s in arrivals:
        both.insert(length, due_s)
    return both


@settings(max_examples=300, deadline=None)
@given(
    st.lists(ARRIVALS, min_size=1, max_size=5),
    st.lists(any_limits(), min_size=5, max_size=5),
    BLOCK_SIZES,
    SPANS,
)
@example([[(1, 1), (5, 0), (5, 0)]], [BatchLimits(1, 1, 0)], 4, (1, 0, 1))
def test_it_finds_what_the_plain_search_finds(
    waves: list[list[tuple[int, int]]],
    limits: list[BatchLimits],
    block_size: int,
    span: tuple[int, int, int],
) -> None:
    both, now = Both(block_size, *span), 0.0
    for wave, limit in zip(waves, limits, strict=False):
        for length, due_in_s in wave:
            now += 0.1
            both.insert(length, now + due_in_s, now)
        keys = form_batch(both.tree, limit, now + HORIZON_S, now - STARVATION_S)
        assert len(keys) == len(set(keys))
        assert set(keys) == plain_batch(both.plain, limit, now + HORIZON_S, now - STARVATION_S)
        both.tree.take_batch(keys, now)
        both.plain.take_batch(keys, now)
        both.tree.check()
        now += 2


@settings(max_examples=300, deadline=None)
@given(ARRIVALS, any_limits(), BLOCK_SIZES, SPANS)
def test_what_holds_of_every_batch(
    arrivals: list[tuple[int, int]], limits: BatchLimits, block_size: int, span: tuple[int, int, int]
) -> None:
    both = filled(arrivals, block_size, *span)
    batch = both.of(form_batch(both.tree, limits, urgent_before_s=10))
    num_blocks = sum(each.num_blocks for each in batch)
    assert num_blocks <= limits.max_blocks and len(batch) <= limits.max_requests
    rest = [each for each in both.plain.pooled.values() if each not in batch]
    fitting = [each for each in rest if num_blocks + each.num_blocks <= limits.max_blocks]
    if len(batch) < min(limits.min_requests, limits.max_requests) or (not batch and limits.max_requests):
        assert not fitting
    if batch:
        assert_no_hole(batch, fitting)
        assert_has_the_most_urgent(batch, both, limits)


def assert_no_hole(batch: list[Pooled], fitting: list[Pooled]) -> None:
    """What lies between its lengths and would fit is in it, except where a leaf had to choose."""
    low, high = min(each.length for each in batch), max(each.length for each in batch)
    assert high - low < LEAF_WIDTH or not any(low < each.length < high for each in fitting)


def assert_has_the_most_urgent(batch: list[Pooled], both: Both, limits: BatchLimits) -> None:
    alone = [each for each in both.plain.pooled.values() if each.num_blocks <= limits.max_blocks]
    earliest = min(each.due_s for each in alone)
    # one that fits no batch may decide where to look, if its neighbours fit
    is_cut = any(each.num_blocks > limits.max_blocks for each in both.plain.pooled.values())
    if earliest <= 10 and (not is_cut or both.block_size % LEAF_WIDTH == 0):
        assert any(each.due_s == earliest for each in batch)


@settings(max_examples=300, deadline=None)
@example([(1, 0), (1, 0), (97, 0), (97, 0), (97, 0)], BatchLimits(6, 3, 2), 32)
@given(ARRIVALS, any_limits(), BLOCK_SIZES)
def test_its_lengths_lie_within_the_smallest_range_that_is_too_much(
    arrivals: list[tuple[int, int]], limits: BatchLimits, block_size: int
) -> None:
    """Unless it has to look further for enough requests."""
    both = filled(arrivals, block_size)
    batch = both.of(form_batch(both.tree, limits))
    if len(batch) <= limits.min_requests:
        return
    seen = [each for each in both.plain.pooled.values() if each.num_blocks <= limits.max_blocks]
    plain, area, too_much = PlainSearch(both.plain, limits, seen), EVERYTHING, EVERYTHING
    while not plain.is_all_fitting(area) and area.width > LEAF_WIDTH:
        too_much, area = area, plain.next(area, -math.inf)
    # How many it has if it takes the largest first. With fewer than it needs, it may look further for any of them.
    sizes = sorted((each.num_blocks for each in seen if each.length in too_much), reverse=True)
    num_sure = sum(size <= limits.max_blocks for size in accumulate(sizes))
    if num_sure < limits.min_requests:
        return
    if block_size % LEAF_WIDTH == 0 and max(arrivals)[0] <= MAX_LENGTH:
        assert all(each.length in too_much for each in batch)


def test_the_densest_range_is_taken_whole() -> None:
    both = Both(16)
    sparse = [both.insert(length) for length in (3000, 5000, 5001, 9000)]
    dense = [both.insert(1040 + 10 * step) for step in range(10)]
    found = form_batch(both.tree, BatchLimits(max_blocks=800, max_requests=99, min_requests=8))
    assert sorted(found) == dense and not set(found) & set(sparse)
    everything = BatchLimits(max_blocks=5000, max_requests=99, min_requests=8)
    assert len(form_batch(both.tree, everything)) == 14


def test_a_leaf_that_holds_too_much_gives_the_most_urgent() -> None:
    both = Both(16)
    keys = [both.insert(1000, due_s=100 - step) for step in range(10)]
    assert form_batch(both.tree, BatchLimits(3 * 63, 99)) == keys[:-4:-1]
    assert form_batch(both.tree, BatchLimits(9999, 3)) == keys[:-4:-1]


def test_an_urgent_request_takes_its_neighbours_along() -> None:
    both = Both(16)
    for _ in range(20):
        both.insert(100)
    near = [both.insert(length) for length in (5000, 5100, 5200)]
    urgent = both.insert(5150, due_s=1)
    limits = BatchLimits(max_blocks=1285, max_requests=99, min_requests=4)
    assert sorted(form_batch(both.tree, limits, urgent_before_s=1)) == [*near, urgent]
    assert len(form_batch(both.tree, limits, urgent_before_s=0.9)) == 20
    # what is left of the blocks goes to the nearest there are
    roomy = BatchLimits(max_blocks=1300, max_requests=99, min_requests=4)
    assert len(form_batch(both.tree, roomy, urgent_before_s=1)) == 7


def test_batch_expansion_takes_the_nearest_next_the_shorter_of_two_and_siblings_first() -> None:
    both = Both(16)
    # of the range 577 .. 640, and just beyond it
    seed, left, right, far_left, far_right, beyond = (
        both.insert(length, due_s)
        for length, due_s in [(610, 1), (590, 9), (630, 9), (580, 9), (640, 9), (576, 9)]
    )
    for max_requests in range(1, 7):
        limits = BatchLimits(9999, max_requests, min_requests=max_requests)
        found = form_batch(both.tree, limits, urgent_before_s=1)
        assert found == [seed, left, far_left, right, far_right, beyond][:max_requests]


def test_an_urgent_request_may_be_alone() -> None:
    both = Both(16)
    both.insert(40_000)
    urgent = both.insert(30_000, due_s=1)
    assert form_batch(both.tree, BatchLimits(30_000 // 16, 99, 36), urgent_before_s=1) == [urgent]


def test_a_range_that_waits_too_long_goes_before_a_denser_one() -> None:
    both = Both(16)
    limits = BatchLimits(max_blocks=100, max_requests=4, min_requests=1)
    lonely = both.insert(1200, now=0)
    for now in range(20):
        for _ in range(4):
            both.insert(50, now=now)
        keys = form_batch(both.tree, limits, starved_before_s=now - STARVATION_S)
        both.tree.take_batch(keys, now)
        if lonely in keys:
            break
    assert now == STARVATION_S + 1


def test_one_that_fits_no_batch_is_in_nobody_s_way() -> None:
    both = Both(16)
    for _ in range(5):
        both.insert(5000, due_s=0)
    small = both.insert(100, due_s=50)
    limits = BatchLimits(max_blocks=100, max_requests=99, min_requests=1)
    assert form_batch(both.tree, limits) == form_batch(both.tree, limits, urgent_before_s=1) == [small]
    assert form_batch(both.tree, BatchLimits(6, 99)) == form_batch(both.tree, BatchLimits(100, 0)) == []
    assert form_batch(QuadTree(KvSpan(16)), limits) == []


def test_lengths_beyond_the_tree_are_judged_by_their_own_blocks() -> None:
    both = Both(16)
    long, longer = both.insert(70_000), both.insert(140_000)
    assert form_batch(both.tree, BatchLimits(4400, 99)) == [long]
    assert form_batch(both.tree, BatchLimits(4100, 99)) == []
    assert sorted(form_batch(both.tree, BatchLimits(99_999, 99))) == [long, longer]
    short = both.insert(10)
    assert form_batch(both.tree, BatchLimits(4100, 99)) == [short]


@settings(max_examples=200, deadline=None)
@given(ARRIVALS, any_limits(), CLOSE, st.integers(0, 2000), BLOCK_SIZES, SPANS)
def test_near_search_takes_the_nearest_to_the_middle_that_fit(
    arrivals: list[tuple[int, int]],
    limits: BatchLimits,
    low: int,
    width: int,
    block_size: int,
    span: tuple[int, int, int],
) -> None:
    both, high = filled(arrivals, block_size, *span), low + width
    found = both.of(find_near(both.tree, low, high, limits))
    within = [each for each in both.plain.pooled.values() if low <= each.length <= high]
    # of equally near ones the shorter, of equally long ones the first
    within.sort(key=lambda each: (abs(2 * each.length - low - high), each.length, each.key))
    expected: list[Pooled] = []
    blocks_left = limits.max_blocks
    for each in within:
        if each.num_blocks <= blocks_left and len(expected) < limits.max_requests:
            expected.append(each)
            blocks_left -= each.num_blocks
    assert found == expected


def test_a_batch_is_filled_up_with_the_longest_that_still_fit() -> None:
    both = Both(4)
    both.insert(56)
    urgent, near = both.insert(1, due_s=1), both.insert(20)
    limits = BatchLimits(max_blocks=6, max_requests=2, min_requests=3)
    assert form_batch(both.tree, limits, urgent_before_s=1) == [urgent, near]
    assert plain_batch(both.plain, limits, 1, -math.inf) == {urgent, near}
