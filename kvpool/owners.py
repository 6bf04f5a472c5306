"""Which request owns which block, written in the segment, so that a pool that starts again finds what there was.

Each block has a row: its request's key (0: no request's), and which of the request's blocks it is. What concerns the
request as a whole stands in the row of its first block. There `num_blocks` decides: blocks whose position is below it
are the request's, others are not. It is one aligned word, written last when blocks come and first when they go. So a
process killed between any two writes leaves every request whole, as it was before or as it is after, and rows that
belong to nothing, which `recover` clears. Nothing is answered before it stands here: no process uses the blocks of
such rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from alignedserve.types import PoolBlockId, RequestKey


class AllocationState(IntEnum):
    # The blocks are waiting to be filled. This state is never dropped, and it lapses at a deadline.
    RESERVED = 1
    # This is the authoritative copy. It is never dropped.
    HELD = 2
    # This is a copy of KV that lives elsewhere. It is dropped when room is needed.
    SPARE = 3


@dataclass(slots=True)
class Allocation:
    """What the pool has of a request."""

    key: RequestKey
    blocks: list[PoolBlockId]
    # The number of committed tokens, whose KV is in the first blocks.
    num_tokens: int
    state: AllocationState
    # The time at which a reservation lapses, in seconds of the pool's clock.
    deadline_s: float = 0.0


class OwnerTable:
    NUM_COLUMNS = 5

    def __init__(self, columns: NDArray[np.int64]) -> None:
        """`columns` has the shape [NUM_COLUMNS, number of blocks]; where they are zero all blocks are free."""
        self._key, self._position, self._num_blocks, self._num_tokens, self._state = columns

    @classmethod
    def plain(cls, num_blocks: int) -> OwnerTable:
        """Makes an empty table in this process's memory."""
        return cls(np.zeros((cls.NUM_COLUMNS, num_blocks), np.int64))

    @property
    def size(self) -> int:
        return len(self._key)

    @property
    def num_owned(self) -> int:
        return int(np.count_nonzero(self._key))

    def extend(self, key: RequestKey, blocks: Sequence[PoolBlockId], added: Sequence[PoolBlockId]) -> None:
        """Appends `added` to the `blocks` that the request has. If it has none yet it becomes reserved."""
        first, end = len(blocks), len(blocks) + len(added)
        head = blocks[0] if blocks else added[0]
        if not blocks:
            self.record(head, 0, AllocationState.RESERVED)
        self._position[added] = range(first, end)
        self._key[added] = key
        self._num_blocks[head] = end

    def shrink(self, blocks: Sequence[PoolBlockId], num_kept: int) -> None:
        self._num_blocks[blocks[0]] = num_kept
        self._key[blocks[num_kept:]] = 0

    def record(self, head: PoolBlockId, num_tokens: int, state: AllocationState) -> None:
        """Writes what concerns the request as a whole; `head` is its first block."""
        self._num_tokens[head] = num_tokens
        self._state[head] = state

    def recover(self) -> list[Allocation]:
        """Returns what requests have, in the order of their first blocks. Clears rows that belong to nothing."""
        owned = np.flatnonzero(self._key)
        rows = owned[np.lexsort((self._position[owned], self._key[owned]))]
        keys = self._key[rows]
        allocations = [self._allocation(head, rows, keys) for head in np.flatnonzero(self._num_blocks)]
        whole = [block for allocation in allocations for block in allocation.blocks]
        self._key[np.setdiff1d(owned, whole)] = 0
        return allocations

    def _allocation(self, head: np.intp, rows: NDArray[np.intp], keys: NDArray[np.int64]) -> Allocation:
        """`rows` are all rows that have owners, by key and position; `keys` are their keys."""
        key, count = int(self._key[head]), int(self._num_blocks[head])
        start = np.searchsorted(keys, key)
        blocks = rows[start : start + count]
        num_found = np.count_nonzero((self._key[blocks] == key) & (self._position[blocks] < count))
        if num_found != count or blocks[0] != head:
            raise RuntimeError(f"owner table: request {key} has {count} blocks, and {num_found} rows name it")
        return Allocation(
            RequestKey(key),
            blocks.tolist(),
            int(self._num_tokens[head]),
            AllocationState(int(self._state[head])),
        )
