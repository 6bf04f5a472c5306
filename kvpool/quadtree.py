"""Pooled requests by prefix length, so that dense ranges of lengths are found without looking at requests.

Lengths are 1 .. 65536; longer ones count as 65536. The root covers all of them, each node's range is cut in four, and
leaves are 16 wide. The tree is implicit: one array per level and count, no pointers. The children of node i are
4i .. 4i + 3.

    depth       0      1     2     3    4     5     6
    nodes       1      4    16    64  256  1024  4096
    width   65536  16384  4096  1024  256    64    16

Beside the tree there are each length's requests, by deadline and in order of arrival, and the sorted lengths that
occur. These are plain lists, since a change moves their content as one piece of memory.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from heapq import merge
from typing import NamedTuple

from alignedserve.kv.span import KvSpan
from alignedserve.types import RequestKey

MAX_LENGTH = 65536
LEAF_WIDTH = 16
NUM_LEVELS = 7
NUM_LEAVES = MAX_LENGTH // LEAF_WIDTH


class TreeNode(NamedTuple):
    depth: int
    # The node's index among the nodes of its depth.
    number: int

    @property
    def is_leaf(self) -> bool:
        return self.depth == NUM_LEVELS - 1

    @property
    def parent(self) -> TreeNode:
        return TreeNode(self.depth - 1, self.number >> 2)

    @property
    def children(self) -> list[TreeNode]:
        first = 4 * self.number
        return [TreeNode(self.depth + 1, number) for number in range(first, first + 4)]

    @property
    def leaves(self) -> tuple[int, int]:
        """The numbers of the first and the last leaf under the node."""
        shift = 2 * (NUM_LEVELS - 1 - self.depth)
        return self.number << shift, ((self.number + 1) << shift) - 1

    @property
    def length_range(self) -> tuple[int, int]:
        """The shortest and the longest length, in tokens, that the node covers."""
        first, last = self.leaves
        return first * LEAF_WIDTH + 1, (last + 1) * LEAF_WIDTH


ROOT = TreeNode(0, 0)


@dataclass(slots=True)
class TreeLevel:
    """The counts of the nodes at one depth, by index."""

    # A leaf's number shifted right by this many bits is the index of the node above it.
    shift: int
    num_requests: list[int]
    num_blocks: list[int]
    earliest_due_s: list[float]
    # When the node last yielded a batch, or got its first request after it was empty.
    waiting_since_s: list[float]

    @classmethod
    def empty(cls, depth: int) -> TreeLevel:
        size = 4**depth
        shift = 2 * (NUM_LEVELS - 1 - depth)
        return cls(shift, [0] * size, [0] * size, [math.inf] * size, [0.0] * size)


class Entry(NamedTuple):
    length: int
    num_blocks: int
    due_s: float


def leaf_of(length: int) -> int:
    return (min(length, MAX_LENGTH) - 1) // LEAF_WIDTH


class QuadTree:
    def __init__(self, span: KvSpan) -> None:
        """`span`: see PoolConfig."""
        self.span = span
        self.levels = [TreeLevel.empty(depth) for depth in range(NUM_LEVELS)]
        # The lengths that occur, sorted.
        self.lengths: list[int] = []
        self._entries: dict[RequestKey, Entry] = {}
        self._at_length: dict[int, dict[RequestKey, None]] = {}
        self._by_due: dict[int, list[tuple[float, RequestKey]]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._entries

    def blocks_for(self, length: int) -> int:
        return self.span.num_at_most(self.span.num_columns(length))

    def longest(self, num_blocks: int) -> int:
        """Returns the most tokens of a request with `num_blocks` blocks, up to MAX_LENGTH."""
        return min(self.span.longest(num_blocks) * self.span.block_size, MAX_LENGTH)

    def blocks_of(self, key: RequestKey) -> int:
        return self._entries[key].num_blocks

    def due_s_of(self, key: RequestKey) -> float:
        return self._entries[key].due_s

    def at_length(self, length: int) -> Collection[RequestKey]:
        """Returns the requests of this length, in order of arrival."""
        return self._at_length[length]

    def by_due(self, leaf: int) -> Iterable[tuple[float, RequestKey]]:
        """Yields a leaf's requests with their deadlines, the most urgent first."""
        return merge(*(self._by_due[length] for length in self._lengths_of(leaf)))

    def _lengths_of(self, leaf: int) -> list[int]:
        first = leaf * LEAF_WIDTH + 1
        return self.lengths[bisect_left(self.lengths, first) : bisect_left(self.lengths, first + LEAF_WIDTH)]

    def insert(self, key: RequestKey, length: int, due_s: float, now: float) -> None:
        if key in self._entries:
            there = self._entries[key].length
            raise RuntimeError(
                f"request {key} is in the tree with {there} tokens already, and comes with {length}"
            )
        entry = Entry(min(length, MAX_LENGTH), self.blocks_for(length), due_s)
        leaf = leaf_of(length)
        self._entries[key] = entry
        self._add_at_length(entry.length, key, due_s)
        for level in self.levels:
            index = leaf >> level.shift
            if not level.num_requests[index]:
                level.waiting_since_s[index] = now
            level.num_requests[index] += 1
            level.num_blocks[index] += entry.num_blocks
        if due_s < self.levels[-1].earliest_due_s[leaf]:
            self._set_earliest(leaf, due_s)

    def remove(self, key: RequestKey) -> None:
        entry = self._entries.pop(key)
        leaf = leaf_of(entry.length)
        self._remove_at_length(entry.length, key, entry.due_s)
        for level in self.levels:
            index = leaf >> level.shift
            level.num_requests[index] -= 1
            level.num_blocks[index] -= entry.num_blocks
        if entry.due_s == self.levels[-1].earliest_due_s[leaf]:
            heads = (self._by_due[length][0][0] for length in self._lengths_of(leaf))
            self._set_earliest(leaf, min(heads, default=math.inf))

    def take_batch(self, keys: Iterable[RequestKey], now: float) -> None:
        """Removes the requests, and records that their ranges have yielded a batch."""
        leaves = {leaf_of(self._entries[key].length) for key in keys}
        for key in keys:
            self.remove(key)
        for level in self.levels:
            for index in {leaf >> level.shift for leaf in leaves}:
                level.waiting_since_s[index] = now

    def check(self) -> None:
        """Raises unless the counts at each level match the requests."""
        num_blocks = sum(entry.num_blocks for entry in self._entries.values())
        earliest = min((entry.due_s for entry in self._entries.values()), default=math.inf)
        there = (len(self._entries), num_blocks, earliest)
        for depth, level in enumerate(self.levels):
            counted = (sum(level.num_requests), sum(level.num_blocks), min(level.earliest_due_s))
            if counted != there:
                raise RuntimeError(
                    f"depth {depth} counts (requests, blocks, earliest) {counted}, there are {there}"
                )

    def _add_at_length(self, length: int, key: RequestKey, due_s: float) -> None:
        at_length = self._at_length.get(length)
        if at_length is None:
            at_length = self._at_length[length] = {}
            self._by_due[length] = []
            insort(self.lengths, length)
        at_length[key] = None
        insort(self._by_due[length], (due_s, key))

    def _remove_at_length(self, length: int, key: RequestKey, due_s: float) -> None:
        at_length, by_due = self._at_length[length], self._by_due[length]
        del at_length[key]
        del by_due[bisect_left(by_due, (due_s, key))]
        if not at_length:
            del self._at_length[length]
            del self._by_due[length]
            del self.lengths[bisect_left(self.lengths, length)]

    def _set_earliest(self, leaf: int, earliest: float) -> None:
        """Updates the nodes from the leaf up, as far as anything changes."""
        index = leaf
        for level in reversed(self.levels):
            if level.earliest_due_s[index] == earliest:
                return
            level.earliest_due_s[index] = earliest
            first_sibling = index & ~3
            earliest = min(level.earliest_due_s[first_sibling : first_sibling + 4])
            index >>= 2
