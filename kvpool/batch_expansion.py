"""Adds requests near a range to a batch that has too few: always the nearest length next.

It looks among the siblings of the range's node first, then among its parent's siblings, and so on. The nearest length
extends the batch's range least. Between two equally near ones, the shorter is taken.

The batch is full when the nearest request does not fit. Only if it still has too few requests are those that don't fit
skipped.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

from alignedserve.kvpool.batch_builder import BatchBuilder
from alignedserve.kvpool.quadtree import LEAF_WIDTH, QuadTree, TreeNode


class BatchExpansion:
    def __init__(self, tree: QuadTree, builder: BatchBuilder, node: TreeNode, last_leaf: int) -> None:
        """`node` is the range of the batch, and is not empty. Lengths beyond `last_leaf` are ignored."""
        self._tree = tree
        self._lengths = tree.lengths
        self._builder = builder
        self._node = node
        self._max_length = (last_leaf + 1) * LEAF_WIDTH
        low, high = node.length_range
        # Indices of the next length on either side, and the batch's range of lengths so far.
        self._left = bisect_left(self._lengths, low) - 1
        self._right = bisect_right(self._lengths, min(high, self._max_length))
        self._low, self._high = self._lengths[self._left + 1], self._lengths[self._right - 1]
        # Whether a request did not fit.
        self._is_full = False

    def run(self) -> None:
        node = self._node
        while node.depth and self._num_open:
            node = node.parent
            low, high = node.length_range
            self._within(low, min(high, self._max_length))

    @property
    def _num_open(self) -> int:
        """The number of requests that the batch may still take."""
        slots_left, num_missing = self._builder.slots_left, self._builder.num_missing
        return min(slots_left, max(num_missing, 0)) if self._is_full else slots_left

    def _within(self, low: int, high: int) -> None:
        lengths = self._lengths
        while num_open := self._num_open:
            left, right = self._left, self._right
            gap_left = self._low - lengths[left] if left >= 0 and lengths[left] >= low else math.inf
            gap_right = math.inf
            if right < len(lengths) and lengths[right] <= high:
                gap_right = lengths[right] - self._high
            if gap_left == gap_right == math.inf:
                return
            if gap_left <= gap_right:
                self._take_left(num_open)
            else:
                self._take_right(num_open)

    def _take_left(self, num_open: int) -> None:
        builder, length = self._builder, self._lengths[self._left]
        if builder.add_at_length(length, num_open):
            self._low = length
            self._left -= 1
        else:
            self._is_full = True
            fitting = self._tree.longest(builder.blocks_left)
            self._left = bisect_right(self._lengths, fitting, 0, self._left) - 1

    def _take_right(self, num_open: int) -> None:
        length = self._lengths[self._right]
        if self._builder.add_at_length(length, num_open):
            self._high = length
            self._right += 1
        else:
            # Longer requests do not fit either.
            self._is_full = True
            self._right = len(self._lengths)
