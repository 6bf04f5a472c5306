"""Which blocks each request lists, and which content blocks have: stored in the segment, so that a restarted pool can
recover.

Blocks form trees. Each block has a parent, the block of the tokens before its own. Any number of requests may list the
same block: a request's row has its last block, and its other blocks are that block's ancestors. A block may be known by
the hash of all tokens up to its end (`scheduling/prefixes.py`).

Two words decide. A request's last block and the number of its blocks are one aligned word: it is written last when
blocks are added and first when they are removed. Whether a block is known is the other one: it is set after the hash,
and cleared before the block gets another parent.

So if a process is killed between any two writes, each request is intact, in its state before or after the change, and
each known block has the content of its hash. The numbers of owners are not stored: they follow from the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from alignedserve.kvpool.runs import Run
from alignedserve.types import PoolBlockId, RequestKey

# A row's word has the last block above the number of blocks.
_COUNT_BITS = 32
_COUNT_MASK = (1 << _COUNT_BITS) - 1
HASH_BYTES = 32
_HASH_WORDS = HASH_BYTES // 8


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
    # Committed tokens. Their KV is in the first blocks.
    num_tokens: int
    state: AllocationState
    # Its row in the owner table.
    row: int
    # The last run of its blocks. None: it has no blocks.
    tail: Run | None = None
    # When a reservation lapses, in seconds on the pool's clock.
    deadline_s: float = 0.0
    # The hashes of its first blocks, as far as they may become known. The first `num_published` need nothing more.
    hashes: Sequence[bytes] = ()
    num_published: int = 0
    # When it became a spare: see `BlockAllocator`.
    since: int = 0
    # Whether nothing was committed yet: the KV of its first tokens was found.
    is_new: bool = False

    @property
    def is_spare(self) -> bool:
        return self.state is AllocationState.SPARE

    @property
    def num_blocks(self) -> int:
        return self.tail.end if self.tail else 0

    @property
    def blocks(self) -> list[PoolBlockId]:
        """Collected anew each time."""
        return self.tail.all_blocks if self.tail else []


@dataclass(frozen=True)
class Recovered:
    # In the order of their rows, each with its last block.
    allocations: list[tuple[Allocation, PoolBlockId]]
    # The hashes of known blocks.
    known: dict[PoolBlockId, bytes]
    # For each block, whether it is known or a request lists it.
    is_used: NDArray[np.bool_]


class OwnerTable:
    NUM_COLUMNS = 6 + _HASH_WORDS

    def __init__(self, columns: NDArray[np.int64]) -> None:
        """`columns` has shape [NUM_COLUMNS, number of blocks]. If it is all zeros, all blocks are free."""
        # For each block. A parent is stored as its number + 1; 0: none.
        self._parent, self._is_known, self._hash = columns[0], columns[1], columns[2 : 2 + _HASH_WORDS]
        # For each request. There are as many rows as blocks. The number of tokens is negative as long as it is new.
        self._key, self._num_tokens, self._state, self._tail = columns[2 + _HASH_WORDS :]

    @classmethod
    def plain(cls, num_blocks: int) -> OwnerTable:
        """Makes an empty table in this process's memory."""
        return cls(np.zeros((cls.NUM_COLUMNS, num_blocks), np.int64))

    @property
    def size(self) -> int:
        return len(self._key)

    @property
    def num_requests(self) -> int:
        return int(np.count_nonzero(self._tail))

    @property
    def num_known(self) -> int:
        return int(np.count_nonzero(self._is_known))

    @property
    def parents(self) -> NDArray[np.int64]:
        """The parent of each block; -1: none. It says nothing about blocks that are free."""
        return np.asarray(self._parent) - 1

    # ---- requests ----------------------------------------------------------------------------------------------------

    def begin(
        self, row: int, key: RequestKey, num_tokens: int, state: AllocationState, is_new: bool = False
    ) -> None:
        """Writes the data of a request in a free row. It exists from its first blocks on."""
        self._key[row] = key
        self.record(row, num_tokens, state, is_new)

    def extend(
        self, row: int, num_blocks: int, last: PoolBlockId | None, added: Sequence[PoolBlockId]
    ) -> None:
        """Appends `added`, which nothing else uses, to a request with `num_blocks` blocks, of which `last` is the last
        one."""
        chain = np.array([-1 if last is None else last, *added], np.int64)
        self._parent[chain[1:]] = chain[:-1] + 1
        self._point(row, added[-1], num_blocks + len(added))

    def point(self, row: int, num_blocks: int, last: PoolBlockId | None) -> None:
        """Lets a request have `num_blocks` blocks, of which `last` is the last one: some of those that it has, or that
        others have. Its row is free if that is none."""
        self._point(row, 0 if last is None else last, num_blocks)

    def record(self, row: int, num_tokens: int, state: AllocationState, is_new: bool = False) -> None:
        self._num_tokens[row] = -num_tokens if is_new else num_tokens
        self._state[row] = state

    def _point(self, row: int, tail: int, num_blocks: int) -> None:
        self._tail[row] = tail << _COUNT_BITS | num_blocks

    # ---- content -----------------------------------------------------------------------------------------------------

    def publish(self, blocks: NDArray[np.int64], hashes: Sequence[bytes]) -> None:
        """Makes the blocks known by these hashes. The parent of the first one is known, or there is none."""
        words = np.frombuffer(b"".join(hashes), np.int64).reshape(-1, _HASH_WORDS)
        self._hash[:, blocks] = words.T
        self._is_known[blocks] = 1

    def forget(self, blocks: Sequence[PoolBlockId]) -> None:
        self._is_known[blocks] = 0

    # ---- recovery ----------------------------------------------------------------------------------------------------

    def recover(self) -> Recovered:
        """Returns what is there. Forgets known blocks with ancestors that are not known."""
        is_known = np.asarray(self._is_known).astype(bool)
        is_whole = _are_whole(np.asarray(self._parent), is_known)
        cut_off = np.flatnonzero(is_known & ~is_whole)
        self.forget([*map(PoolBlockId, cut_off.tolist())])
        known = np.flatnonzero(is_whole)
        data = np.ascontiguousarray(np.asarray(self._hash)[:, known].T).tobytes()
        hashes = [data[first : first + HASH_BYTES] for first in range(0, len(data), HASH_BYTES)]
        allocations, is_listed = self._allocations()
        return Recovered(
            allocations,
            dict(zip(map(PoolBlockId, known.tolist()), hashes, strict=True)),
            is_listed | is_whole,
        )

    def _allocations(self) -> tuple[list[tuple[Allocation, PoolBlockId]], NDArray[np.bool_]]:
        """Returns the requests, each with its last block, and for each block whether a request lists it."""
        words = np.asarray(self._tail)
        rows = np.flatnonzero(words)
        counts = words[rows] & _COUNT_MASK
        # The longest first, so those that are not at their first block yet are always the first ones.
        order = np.argsort(-counts, kind="stable")
        rows, counts = rows[order], counts[order]
        is_listed = np.zeros(self.size, bool)
        at, parents = words[rows] >> _COUNT_BITS, np.asarray(self._parent)
        for num_done in range(int(counts[0]) if len(counts) else 0):
            num_left = int(np.searchsorted(-counts, -num_done))
            self._check_linked(at[num_left:] < 0, rows[num_left:], counts[num_left:], "more")
            at = at[:num_left]
            self._check_linked(at >= 0, rows, counts, num_done)
            is_listed[at] = True
            at = parents[at] - 1
        self._check_linked(at < 0, rows, counts, "more")
        found = [
            (self._allocation(row), PoolBlockId(int(words[row]) >> _COUNT_BITS))
            for row in sorted(rows.tolist())
        ]
        return found, is_listed

    def _allocation(self, row: int) -> Allocation:
        num_tokens, state = int(self._num_tokens[row]), AllocationState(int(self._state[row]))
        return Allocation(
            RequestKey(int(self._key[row])), abs(num_tokens), state, row, is_new=num_tokens <= 0
        )

    def _check_linked(
        self,
        is_right: NDArray[np.bool_],
        rows: NDArray[np.int64],
        counts: NDArray[np.int64],
        found: int | str,
    ) -> None:
        if not is_right.all():
            first = int(np.argmin(is_right))
            key, count = int(self._key[rows[first]]), int(counts[first])
            raise RuntimeError(f"owner table: request {key} has {count} blocks, and {found} are linked")


def _are_whole(parents: NDArray[np.int64], is_known: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Returns for each block whether it and all of its ancestors are known. Follows the parents of all blocks at once:
    each round doubles the distance."""
    # Stands for the parent of blocks without one. It is its own parent.
    root = len(parents)
    num_rounds = int(np.count_nonzero(is_known) + 1).bit_length()
    are_known = np.append(is_known, True)
    above = np.append(np.where(parents > 0, parents - 1, root), root)
    # Parents of blocks that are not known may be left from earlier use, and even form circles.
    above = np.where(are_known, above, root)
    are_whole: NDArray[np.bool_] = are_known & are_known[above]
    for _ in range(num_rounds):
        are_whole &= are_whole[above]
        above = above[above]
    are_whole &= above == root
    return are_whole[:-1]
