"""Operations on blocks that two requests fill from both ends, and how they are carried out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from alignedserve.engine.request import Request
from alignedserve.instance.executor import Executor
from alignedserve.types import RequestKey

# Host memory has room for the overwritten KV of one block in this many. When RT needs more, whole requests must leave.
BLOCKS_PER_PART = 4


@dataclass(frozen=True, slots=True)
class Lend:
    """Makes the lender's block also the borrower's block `at`. The borrower has `at` blocks before it."""

    borrower: RequestKey
    lender: RequestKey
    index: int
    at: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Copies tokens `first` to `end` of the lender's block to host memory, before they are overwritten."""

    lender: RequestKey
    index: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Removes the block from the lender. It now belongs only to the borrower."""

    lender: RequestKey
    index: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Gives the lender a new block in place of the shared one, with the same content."""

    lender: RequestKey
    index: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Copies tokens `first` to `end` of the lender's block back from host memory."""

    lender: RequestKey
    index: int
    first: int
    end: int


# `shared_ends.py` decides which ones a plan has, in which order.
EndOp = Lend | Checkpoint | GiveUp | Renew | Restore


def make_room(engine: Executor) -> int:
    """Makes host memory for KV that is overwritten. Returns the number of blocks for which it has room."""
    num_parts = max(engine.num_blocks // BLOCKS_PER_PART, 1)
    engine.make_checkpoints(num_parts)
    return num_parts


def carry_out(ops: Iterable[EndOp], engine: Executor, requests: Mapping[RequestKey, Request]) -> Counter[str]:
    """Returns the bytes copied, by purpose."""
    num_bytes: Counter[str] = Counter()
    for op in ops:
        lender = requests[op.lender]
        match op:
            case Lend(borrower, _, index, at):
                engine.allocate_up_to(requests[borrower], at)
                engine.lend(requests[borrower], lender, index)
            case Checkpoint(_, index, first, end):
                num_bytes["checkpoint"] += engine.checkpoint(lender, index, first, end)
            case GiveUp(_, index):
                engine.give_up(lender, index)
            case Renew(_, index):
                engine.renew(lender, index)
            case Restore(_, index, first, end):
                num_bytes["restore"] += engine.restore(lender, index, first, end)
    return +num_bytes
