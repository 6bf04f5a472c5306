"""What a decode instance does at an iteration boundary, as its schedule decides."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from alignedserve.protocol.messages import Work
from alignedserve.types import RequestKey


@dataclass(frozen=True, slots=True)
class Lend:
    """The lender's block is the borrower's block `at` as well: it has as many before."""

    borrower: RequestKey
    lender: RequestKey
    index: int
    at: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tokens `first` to `end` of the lender's block are copied to host memory: others overwrite them."""

    lender: RequestKey
    index: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The lender has no block of this index any more: it is the borrower's alone."""

    lender: RequestKey
    index: int


@dataclass(frozen=True, slots=True)
class Renew:
    """The lender has a fresh block of this index, with what was in the one that it shared."""

    lender: RequestKey
    index: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Tokens `first` to `end` of the lender's block are copied back from host memory."""

    lender: RequestKey
    index: int
    first: int
    end: int


# What becomes of blocks that two requests share from both ends: see `shared_ends.py`.
EndOp = Lend | Checkpoint | GiveUp | Renew | Restore


class DecodePlan(msgspec.Struct):
    """It is a struct, which takes less time to make than a dataclass: there is one for each iteration."""

    # These requests leave at once, with their KV: their blocks are free before anybody takes any.
    drops: list[RequestKey] = []
    # These requests have passed blocks, which are free even before that.
    passing: list[RequestKey] = []
    # The KV of these requests is to be copied here; their blocks are taken. `pulled` or `pull_failed` follows.
    pulls: list[Work] = []
    # These prompts, of which there is no KV, start: their blocks are taken, and they may run at once.
    new_prompts: list[Work] = []
    # Those of the new prompts of which the inputs of layers are kept in place of KV.
    keep_inputs: set[RequestKey] = set()
    # These requests compute all their pending tokens, usually one, and sample the next: `sampled` follows.
    run: list[RequestKey] = []
    # These requests compute so many tokens, fewer than they have pending: `computed` follows.
    chunks: list[tuple[RequestKey, int]] = []
    # All requests whose eviction is wanted now, whether an earlier plan wanted it or not.
    wants_evicted: list[RequestKey] = []
    # These come before the iteration, in this order, after new prompts have their own blocks.
    ends: list[EndOp] = []
    # For so many seconds nothing runs, unless something happens before: real time is about to join.
    hold_s: float = 0.0

    def num_lent(self, key: RequestKey) -> int:
        """The number of blocks that the request is lent."""
        return sum(isinstance(op, Lend) and op.borrower == key for op in self.ends)

    @property
    def goes_on(self) -> bool:
        """Whether the next plan can be made at once, without waiting for a wake."""
        return bool(self.run or self.chunks or self.new_prompts)
