"""A batch under construction: requests from the tree's lengths, within limits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from alignedserve.kvpool.quadtree import MAX_LENGTH, QuadTree
from alignedserve.types import RequestKey


@dataclass(frozen=True)
class BatchLimits:
    # The most blocks of KV in the batch.
    max_blocks: int
    max_requests: int
    # A batch has fewer requests only if no other request fits.
    min_requests: int = 0


class BatchBuilder:
    def __init__(self, tree: QuadTree, limits: BatchLimits) -> None:
        self._tree = tree
        self._limits = limits
        self.keys: list[RequestKey] = []
        self.blocks_left = limits.max_blocks

    @property
    def slots_left(self) -> int:
        return self._limits.max_requests - len(self.keys)

    @property
    def num_missing(self) -> int:
        """Requests that the batch lacks to its minimum; negative if it has more."""
        return self._limits.min_requests - len(self.keys)

    def add(self, key: RequestKey) -> bool:
        """Adds the request and returns True if it fits. Otherwise changes nothing and returns False."""
        num_blocks = self._tree.blocks_of(key)
        if num_blocks > self.blocks_left or not self.slots_left:
            return False
        self.keys.append(key)
        self.blocks_left -= num_blocks
        return True

    def add_at_length(self, length: int, at_most: int) -> bool:
        """Adds requests of this length in order of arrival until one does not fit. Returns whether it added all."""
        keys = self._tree.at_length(length)
        at_most = min(at_most, self.slots_left)
        if length == MAX_LENGTH:
            # Requests above the maximum length count as this length but may have more blocks, so each is tried
            # separately.
            return all(self.add(key) for key in islice(keys, at_most)) and at_most >= len(keys)
        num_blocks = self._tree.blocks_for(length)
        count = min(len(keys), at_most, self.blocks_left // num_blocks)
        self.keys.extend(islice(keys, count))
        self.blocks_left -= count * num_blocks
        return count == len(keys)
