"""Density First Search: finds the next batch, as large as possible, of requests with similar length.

It starts at the root; or at the leaf of the most urgent request, if that request's admission deadline falls within the
horizon. At each node:

- If all of it fits and has enough requests, that is the batch.
- If it is too much, the search goes to the child that has waited longest for a batch, if that exceeds the starvation
  threshold; otherwise to the child with the most requests. A leaf yields its requests, the most urgent first, as long
  as they fit.
- If it is too little, its requests are kept, and the batch is expanded (batch_expansion.py).

Requests that exceed `max_blocks` on their own are ignored. So a search ends with the leaf of the longest that does not.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import NamedTuple

from alignedserve.kvpool.batch_builder import BatchBuilder, BatchLimits, TailOf
from alignedserve.kvpool.batch_expansion import BatchExpansion
from alignedserve.kvpool.quadtree import MAX_LENGTH, NUM_LEAVES, ROOT, QuadTree, TreeNode, leaf_of
from alignedserve.types import RequestKey


class Totals(NamedTuple):
    num_requests: int
    num_blocks: int
    earliest_due_s: float


def form_batch(
    tree: QuadTree,
    limits: BatchLimits,
    urgent_before_s: float = -math.inf,
    starved_before_s: float = -math.inf,
    tail_of: TailOf | None = None,
) -> list[RequestKey]:
    """Returns the requests of the next batch, empty if nothing fits. Changes nothing. A request is urgent if it is due
    by `urgent_before_s`. A node is starved if its last batch was before `starved_before_s`. With `tail_of`, blocks that
    requests have in common count once."""
    if not tree.lengths or limits.max_requests < 1:
        return []
    longest_leaf, last_leaf = leaf_of(tree.lengths[-1]), leaf_of(tree.longest(limits.max_blocks))
    while last_leaf >= 0:
        end = last_leaf if longest_leaf > last_leaf else NUM_LEAVES - 1
        search = DensityFirstSearch(tree, limits, end, tail_of)
        if not search.totals(ROOT).num_requests:
            return []
        if batch := search.run(urgent_before_s, starved_before_s):
            return batch
        # The search ended in the last leaf, where every request is slightly too long.
        last_leaf = min(last_leaf, longest_leaf) - 1
    return []


class DensityFirstSearch:
    def __init__(
        self, tree: QuadTree, limits: BatchLimits, last_leaf: int, tail_of: TailOf | None = None
    ) -> None:
        self._tree = tree
        self._limits = limits
        self._tail_of = tail_of
        self._last_leaf = last_leaf
        # Totals of nodes that extend beyond the last leaf.
        self._cut: dict[TreeNode, Totals] = {}

    def run(self, urgent_before_s: float, starved_before_s: float) -> list[RequestKey]:
        is_urgent = self.totals(ROOT).earliest_due_s <= urgent_before_s
        node = self._most_urgent_leaf() if is_urgent else ROOT
        while not (fits := self._fits(node)) and not node.is_leaf:
            node = self._next(node, starved_before_s)
        builder = BatchBuilder(self._tree, self._limits, self._tail_of)
        if fits:
            self._take_all(builder, node)
        else:
            self._take_by_due(builder, node)
        if builder.keys and builder.num_missing > 0:
            BatchExpansion(self._tree, builder, node, self._last_leaf).run()
        return builder.keys

    def totals(self, node: TreeNode) -> Totals:
        first, last = node.leaves
        if first > self._last_leaf:
            return Totals(0, 0, math.inf)
        if last > self._last_leaf:
            return self._cut.get(node) or self._cut_totals(node)
        level, index = self._tree.levels[node.depth], node.number
        return Totals(level.num_requests[index], level.num_blocks[index], level.earliest_due_s[index])

    def _cut_totals(self, node: TreeNode) -> Totals:
        parts = [self.totals(child) for child in node.children]
        self._cut[node] = found = Totals(
            sum(part.num_requests for part in parts),
            sum(part.num_blocks for part in parts),
            min(part.earliest_due_s for part in parts),
        )
        return found

    def _fits(self, node: TreeNode) -> bool:
        totals, limits = self.totals(node), self._limits
        return totals.num_blocks <= limits.max_blocks and totals.num_requests <= limits.max_requests

    def _most_urgent_leaf(self) -> TreeNode:
        node = ROOT
        while not node.is_leaf:
            node = min(node.children, key=lambda child: self.totals(child).earliest_due_s)
        return node

    def _next(self, node: TreeNode, starved_before_s: float) -> TreeNode:
        children = {child: count for child in node.children if (count := self.totals(child).num_requests)}
        waiting_since = self._tree.levels[node.depth + 1].waiting_since_s
        longest = min(children, key=lambda child: waiting_since[child.number])
        if waiting_since[longest.number] < starved_before_s:
            return longest
        return max(children, key=lambda child: children[child])

    def _take_all(self, builder: BatchBuilder, node: TreeNode) -> None:
        low, high = node.length_range
        lengths = self._tree.lengths
        for length in lengths[bisect_left(lengths, low) : bisect_right(lengths, high)]:
            if leaf_of(length) > self._last_leaf:
                # No longer request fits, and there may be thousands of lengths.
                break
            builder.add_at_length(length, builder.slots_left)

    def _take_by_due(self, builder: BatchBuilder, leaf: TreeNode) -> None:
        shortest = 1 if builder.counts_shared else self._tree.blocks_for(leaf.length_range[0])
        num_unfit = 0
        for _, key in self._tree.by_due(leaf.number):
            if builder.blocks_left < shortest or not builder.slots_left:
                return
            if builder.counts_shared and num_unfit > self._limits.max_requests:
                # Few requests may have most in common with the batch. The search for them ends at some time.
                return
            num_unfit += not builder.add(key)


def find_near(
    tree: QuadTree, low: int, high: int, limits: BatchLimits, tail_of: TailOf | None = None
) -> list[RequestKey]:
    """Returns requests of lengths low .. high, nearest to the middle first, as many as fit. Changes nothing. `tail_of`:
    see `form_batch`."""
    builder = BatchBuilder(tree, limits, tail_of)
    lengths = tree.lengths
    low, high = min(low, MAX_LENGTH), min(high, MAX_LENGTH)
    middle = (low + high) / 2
    right = bisect_left(lengths, middle)
    left, end = right - 1, bisect_right(lengths, high)
    while builder.slots_left:
        gap_left = middle - lengths[left] if left >= 0 and lengths[left] >= low else math.inf
        gap_right = lengths[right] - middle if right < end else math.inf
        if gap_left == gap_right == math.inf:
            break
        if gap_left <= gap_right:
            is_all = builder.add_at_length(lengths[left], builder.slots_left)
            fitting = lengths[left] - 1 if is_all else tree.longest(builder.blocks_left)
            left = bisect_right(lengths, fitting, 0, left) - 1
        else:
            is_all = builder.add_at_length(lengths[right], builder.slots_left)
            right = right + 1 if is_all else end
    return builder.keys
