"""The copies of a transfer: one per block, or one for several blocks that are consecutive at both ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from alignedserve.types import BlockId, PoolBlockId, RequestKey

# An instance's block and the pool block that it is copied to or from.
Pairs = Sequence[tuple[BlockId, PoolBlockId]]
# A request, and the receiver's blocks for its KV: one for each block that the sender has staged. HAS_BLOCK stands for
# those that are not copied.
TransferSpec = tuple[RequestKey, Sequence[BlockId]]
# The receiver has the KV of this block already.
HAS_BLOCK = BlockId(-1)

# The most bytes per piece. A transfer can stop between two pieces, after about a millisecond.
MAX_PIECE_BYTES = 16 << 20


class Tail(NamedTuple):
    """The pool blocks of a save's last column if only their first slots hold KV. They are consecutive, one per layer
    group."""

    first: PoolBlockId
    num_blocks: int
    num_slots: int

    def has(self, block: int) -> bool:
        return self.first <= block < self.first + self.num_blocks


class Run(NamedTuple):
    """`num_blocks` consecutive blocks: from `here` on this side, from `there` on the other side."""

    here: int
    there: int
    num_blocks: int


def merge(pairs: Iterable[tuple[int, int]], block_bytes: int) -> list[Run]:
    max_blocks = max(1, MAX_PIECE_BYTES // block_bytes)
    runs: list[Run] = []
    for here, there in pairs:
        if runs and runs[-1].num_blocks < max_blocks and _follows(runs[-1], here, there):
            runs[-1] = runs[-1]._replace(num_blocks=runs[-1].num_blocks + 1)
        else:
            runs.append(Run(here, there, 1))
    return runs


def _follows(run: Run, here: int, there: int) -> bool:
    return here == run.here + run.num_blocks and there == run.there + run.num_blocks


def tail_of(pairs: Pairs, num_empty: int, block_size: int, num_groups: int = 1) -> Tail | None:
    """Returns the blocks of the last column, or None if they are full. `num_empty` of their slots are empty."""
    if not 0 <= num_empty < block_size or (num_empty and not pairs):
        raise RuntimeError(
            f"{len(pairs)} blocks of {block_size} slots, of the last of which {num_empty} are empty"
        )
    if not num_empty:
        return None
    first = PoolBlockId(pairs[-1][1] // num_groups * num_groups)
    return Tail(first, num_groups, block_size - num_empty)


def pieces_of(run: Run, tail: Tail | None) -> Iterator[tuple[Run, bool]]:
    """Splits a run of a save into full blocks, together, and blocks of the tail, one by one. Yields each piece, and
    whether it is in the tail."""
    first = end = run.num_blocks
    if tail is not None:
        first, end = (
            min(max(edge - run.there, 0), run.num_blocks)
            for edge in (tail.first, tail.first + tail.num_blocks)
        )
    for begin, stop in pairwise((0, *range(first, end + 1), run.num_blocks)):
        if begin < stop:
            yield Run(run.here + begin, run.there + begin, stop - begin), first <= begin < end


def wanted(specs: Iterable[TransferSpec]) -> list[BlockId]:
    """Returns the receiver's blocks that are copied."""
    return [block for _, blocks in specs for block in blocks if block != HAS_BLOCK]


def check_blocks(blocks: Iterable[int], num_blocks: int, where: str) -> None:
    for block in blocks:
        if not 0 <= block < num_blocks:
            raise RuntimeError(f"block {block} of {where}, which has {num_blocks}")
