"""Which copies a transfer needs: one per block, or one for several blocks which are consecutive at both ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from alignedserve.types import BlockId, PoolBlockId, RequestKey

# Blocks of an instance, each with the pool's block that it is copied from or to.
Pairs = Sequence[tuple[BlockId, PoolBlockId]]
# A request, and the blocks of the receiving instance that its KV is to fill.
TransferSpec = tuple[RequestKey, Sequence[BlockId]]

# The most bytes that are moved in one piece: a transfer can be stopped between two pieces, after about a millisecond.
MAX_PIECE_BYTES = 16 << 20


class Tail(NamedTuple):
    """The pool's block that a save ends with, where only its first slots hold KV."""

    block: PoolBlockId
    num_slots: int


class Run(NamedTuple):
    """`num_blocks` consecutive blocks, which start at `here` on the side that counts the runs and at `there` on the
    other side."""

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


def tail_of(pairs: Pairs, num_tokens: int, block_size: int) -> Tail | None:
    """Returns the last of the blocks unless it is full. All others are full: they hold `num_tokens` together."""
    num_slots = num_tokens - (len(pairs) - 1) * block_size
    if (pairs and not 0 < num_slots <= block_size) or (not pairs and num_tokens):
        raise RuntimeError(f"{len(pairs)} blocks of {block_size} slots for the KV of {num_tokens} tokens")
    return Tail(pairs[-1][1], num_slots) if pairs and num_slots < block_size else None


def check_blocks(blocks: Iterable[int], num_blocks: int, where: str) -> None:
    for block in blocks:
        if not 0 <= block < num_blocks:
            raise RuntimeError(f"block {block} of {where}, which has {num_blocks}")
