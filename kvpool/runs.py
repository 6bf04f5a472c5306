"""Runs of blocks: each block is the parent of the next one, and the same requests list them all.

    system prompt -+- question
                   '- another one -- its next turn

A request lists the blocks of its last run, and of all runs before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from alignedserve.types import PoolBlockId


@dataclass(eq=False, slots=True)
class Run:
    # The run before its first block, and the number of blocks before that.
    parent: Run | None
    first: int
    blocks: list[PoolBlockId]
    # The hashes of its first blocks: those that are known.
    hashes: list[bytes] = field(default_factory=list)
    # The numbers of requests that list it, of other requests than spares and of spares.
    num_needed: int = 0
    num_spares: int = 0
    # The number of runs that continue it.
    num_next: int = 0
    # When a request that listed it was last used.
    last_used: int = 0
    # Until when it is promised to the next turn of a chat (`promises.py`), and the owner of that; 0: it is not.
    promised_until: float = 0.0
    promised_to: str = ""
    # The owner of the requests that list it. Empty: unknown, or there are no keys.
    owner: str = ""

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)

    @property
    def is_listed(self) -> bool:
        return bool(self.num_needed or self.num_spares)

    @property
    def all_blocks(self) -> list[PoolBlockId]:
        """The blocks of a request that ends with this run."""
        parts, run = [self.blocks], self.parent
        while run:
            parts.append(run.blocks)
            run = run.parent
        blocks = list[PoolBlockId]()
        for part in reversed(parts):
            blocks += part
        return blocks


def path_to(tail: Run | None) -> Iterator[Run]:
    """Yields the run and those before it."""
    while tail:
        yield tail
        tail = tail.parent


def runs_of(
    parents: NDArray[np.int64], used: NDArray[np.int64], ends: Sequence[PoolBlockId]
) -> dict[PoolBlockId, Run]:
    """Returns the runs of all used blocks by their last blocks, if requests end with `ends`. A parent of -1: none."""
    above = parents[used]
    # Place 0 stands for the parent of blocks without one.
    is_cut = np.bincount(above + 1, minlength=len(parents) + 1) > 1
    is_cut[[0, *(end + 1 for end in ends)]] = True
    is_first, following = is_cut[above + 1], np.full(len(parents), -1)
    following[above[~is_first]] = used[~is_first]
    next_of, runs = following.tolist(), dict[PoolBlockId, Run]()
    for start in used[is_first].tolist():
        blocks = [start]
        while (block := next_of[blocks[-1]]) >= 0:
            blocks.append(block)
        runs[blocks[-1]] = Run(None, 0, blocks)
    for run in runs.values():
        if (parent := PoolBlockId(int(parents[run.blocks[0]]))) >= 0:
            run.parent = runs[parent]
            run.parent.num_next += 1
    for run in runs.values():
        run.first = sum(len(each.blocks) for each in path_to(run.parent))
    return runs
