"""The owner of each block, stored in the segment so that a restarted pool can recover.

Each block has a row: its request's key (0 if it has none), and its position among the request's blocks. The row of a
request's first block also stores the data of the whole request. There `num_blocks` decides: blocks at lower positions
belong to the request, others do not. It is one aligned word. It is written last when blocks are added and first when
they are removed.

So if a process is killed between any two writes, each request is intact, in its state before or after the change. Rows
without a request may be left, which `recover` clears. No process uses their blocks, because an answer is only sent
after the table is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from alignedserve.types import PoolBlockId, RequestKey


class AllocationState(IntEnum):
    # Waits for its content. Never dropped; lapses at a deadline.
    RESERVED = 1
    # The authoritative copy. Never dropped.
    HELD = 2
    # A copy of KV that lives elsewhere. Dropped when room is needed.
    SPARE = 3


@dataclass(slots=True)
class Allocation:
    """The pool's blocks of a request."""

    key: RequestKey
    blocks: list[PoolBlockId]
    # Committed tokens. Their KV is in the first blocks.
    num_tokens: int
    state: AllocationState
    # When a reservation lapses, in seconds on the pool's clock.
    deadline_s: float = 0.0


class OwnerTable:
    NUM_COLUMNS = 5

    def __init__(self, columns: NDArray[np.int64]) -> None:
        """`columns` has shape [NUM_COLUMNS, number of blocks]. If it is all zeros, all blocks are free."""
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
        """Appends `added` to the request's `blocks`. If it had none, it becomes reserved."""
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
        """Writes the data of the whole request. `head` is its first block."""
        self._num_tokens[head] = num_tokens
        self._state[head] = state

    def recover(self) -> list[Allocation]:
        """Returns the allocations in the order of their first blocks. Clears rows without a request."""
        owned = np.flatnonzero(self._key)
        rows = owned[np.lexsort((self._position[owned], self._key[owned]))]
        keys = self._key[rows]
        allocations = [self._allocation(head, rows, keys) for head in np.flatnonzero(self._num_blocks)]
        whole = [block for allocation in allocations for block in allocation.blocks]
        self._key[np.setdiff1d(owned, whole)] = 0
        return allocations

    def _allocation(self, head: np.intp, rows: NDArray[np.intp], keys: NDArray[np.int64]) -> Allocation:
        """`rows` are all owned rows, sorted by key and position. `keys` are their keys."""
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
