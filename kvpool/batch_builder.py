"""A batch under construction: requests from the tree's lengths, within limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from alignedserve.kvpool.quadtree import MAX_LENGTH, QuadTree
from alignedserve.kvpool.runs import Run
from alignedserve.types import RequestKey

# Returns the last run of a candidate's blocks.
TailOf = Callable[[RequestKey], Run | None]


@dataclass(frozen=True)
class BatchLimits:
    # The most blocks of KV in the batch.
    max_blocks: int
    max_requests: int
    # A batch has fewer requests only if no other request fits.
    min_requests: int = 0


class BatchBuilder:
    def __init__(self, tree: QuadTree, limits: BatchLimits, tail_of: TailOf | None = None) -> None:
        self._tree = tree
        self._limits = limits
        self._tail_of = tail_of
        # The runs of the batch's requests.
        self._runs: set[Run] = set()
        self.keys: list[RequestKey] = []
        self.blocks_left = limits.max_blocks

    @property
    def counts_shared(self) -> bool:
        """Whether blocks that requests of the batch have in common count once."""
        return self._tail_of is not None

    @property
    def slots_left(self) -> int:
        return self._limits.max_requests - len(self.keys)

    @property
    def num_missing(self) -> int:
        """Requests that the batch lacks to its minimum; negative if it has more."""
        return self._limits.min_requests - len(self.keys)

    def add(self, key: RequestKey) -> bool:
        """Adds the request and returns True if it fits. Otherwise changes nothing and returns False."""
        num_blocks, run = self._tree.blocks_of(key), self._tail_of(key) if self._tail_of else None
        num_groups, fresh = self._tree.span.num_groups, list[Run]()
        while run and run not in self._runs:
            fresh.append(run)
            run = run.parent
        if self.counts_shared:
            num_columns = num_blocks // num_groups
            fresh = [each for each in fresh if each.end <= num_columns]
            # The batch has this run and all before it.
            num_blocks -= num_groups * min(run.end if run else 0, num_columns)
        if num_blocks > self.blocks_left or not self.slots_left:
            return False
        self._runs.update(fresh)
        self.keys.append(key)
        self.blocks_left -= num_blocks
        return True

    def add_at_length(self, length: int, at_most: int) -> bool:
        """Adds requests of this length in order of arrival until one does not fit. Returns whether it added all."""
        keys = self._tree.at_length(length)
        at_most = min(at_most, self.slots_left)
        if length == MAX_LENGTH or self.counts_shared:
            # Requests above the maximum length count as this length but may have more blocks, so each is tried
            # separately.
            return all(self.add(key) for key in islice(keys, at_most)) and at_most >= len(keys)
        num_blocks = self._tree.blocks_for(length)
        count = min(len(keys), at_most, self.blocks_left // num_blocks)
        self.keys.extend(islice(keys, count))
        self.blocks_left -= count * num_blocks
        return count == len(keys)
