from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kv.span import KvSpan
from alignedserve.kvpool.quadtree import LEAF_WIDTH, MAX_LENGTH, NUM_LEAVES, ROOT, QuadTree, TreeNode, leaf_of
from alignedserve.types import RequestKey

A, B = RequestKey(1), RequestKey(2)
LENGTHS = st.one_of(
    st.integers(1, 70), st.integers(1, 2 * MAX_LENGTH), st.sampled_from([16, 17, 65536, 65537])
)


def same_counts(one: QuadTree, other: QuadTree) -> bool:
    return all(
        (here.num_requests, here.num_blocks, here.earliest_due_s)
        == (there.num_requests, there.num_blocks, there.earliest_due_s)
        for here, there in zip(one.levels, other.levels, strict=True)
    )


@settings(deadline=None)
@given(st.lists(st.tuples(LENGTHS, st.integers(0, 9)), max_size=30), st.data())
def test_after_removals_it_is_as_if_only_the_rest_had_come(
    requests: list[tuple[int, int]], data: st.DataObject
) -> None:
    tree, rest = QuadTree(KvSpan(block_size=16)), QuadTree(KvSpan(block_size=16))
    gone = data.draw(st.sets(st.integers(0, 29)))
    for key, (length, due_s) in enumerate(requests):
        tree.insert(RequestKey(key), length, due_s, now=0)
        if key not in gone:
            rest.insert(RequestKey(key), length, due_s, now=0)
    for key in gone & set(range(len(requests))):
        tree.remove(RequestKey(key))
    tree.check()
    assert same_counts(tree, rest)
    assert tree.lengths == rest.lengths and len(tree) == len(rest)
    for leaf in map(leaf_of, tree.lengths):
        assert list(tree.by_due(leaf)) == list(rest.by_due(leaf))
    for length in tree.lengths:
        assert list(tree.at_length(length)) == list(rest.at_length(length))


def test_nodes_count_what_is_in_their_range() -> None:
    tree = QuadTree(KvSpan(block_size=16))
    tree.insert(A, 17, due_s=5, now=0)
    tree.insert(B, 33, due_s=3, now=0)
    counts = [
        (level.num_requests[: 1 + leaf_of(33)], level.num_blocks[0], level.earliest_due_s[0])
        for level in tree.levels
    ]
    assert counts[0] == ([2], 5, 3)
    assert counts[5] == ([2, 0, 0], 5, 3)
    assert counts[6] == ([0, 1, 1], 0, float("inf"))


def test_ranges_are_cut_in_four_down_to_sixteen() -> None:
    assert ROOT.length_range == (1, MAX_LENGTH)
    assert TreeNode(1, 3).length_range == (49153, 65536)
    assert TreeNode(6, 1).length_range == (17, 32) and TreeNode(6, 1).is_leaf
    assert ROOT.children[2].children[1].parent == TreeNode(1, 2)
    for length in (1, 16, 17, 4096, 65535, 65536):
        low, high = TreeNode(6, leaf_of(length)).length_range
        assert low <= length <= high == low + LEAF_WIDTH - 1
    assert leaf_of(MAX_LENGTH) == leaf_of(10**6) == NUM_LEAVES - 1


def test_longer_ones_count_as_the_longest_but_keep_their_blocks() -> None:
    tree = QuadTree(KvSpan(block_size=16))
    tree.insert(A, 100_000, due_s=0, now=0)
    assert tree.lengths == [MAX_LENGTH] and tree.blocks_of(A) == 6250
    tree.remove(A)
    tree.check()
    assert not tree.lengths


def test_a_range_waits_from_its_first_request_or_its_last_batch() -> None:
    tree = QuadTree(KvSpan(block_size=16))

    def since(length: int) -> list[float]:
        return [level.waiting_since_s[leaf_of(length) >> level.shift] for level in tree.levels]

    tree.insert(A, 1, due_s=0, now=10)
    tree.insert(B, 60_000, due_s=0, now=11)
    assert since(1) == [10] * 7 and since(60_000) == [10] + [11] * 6
    tree.insert(RequestKey(3), 2, due_s=0, now=12)
    assert since(1) == [10] * 7
    tree.take_batch([A], now=13)
    assert since(1) == [13] * 7 and since(60_000) == [13] + [11] * 6
    tree.remove(RequestKey(3))
    tree.insert(A, 1, due_s=0, now=14)
    assert since(1) == [13] + [14] * 6
    tree.check()


def test_a_request_is_in_it_once() -> None:
    tree = QuadTree(KvSpan(block_size=16))
    tree.insert(A, 5, due_s=0, now=0)
    with pytest.raises(
        RuntimeError, match="request 1 is in the tree with 5 tokens already, and comes with 6"
    ):
        tree.insert(A, 6, due_s=0, now=0)
    tree.remove(A)
    with pytest.raises(KeyError):
        tree.remove(A)


def test_a_wrong_count_is_told_with_both_numbers() -> None:
    tree = QuadTree(KvSpan(block_size=16))
    tree.insert(A, 5, due_s=7, now=0)
    tree.levels[3].num_requests[0] = 2
    with pytest.raises(RuntimeError, match=r"depth 3 counts .* \(2, 1, 7\), there are \(1, 1, 7\)"):
        tree.check()
