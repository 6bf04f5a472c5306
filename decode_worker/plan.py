"""The actions of a decode instance at an iteration boundary, as decided by its schedule."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from alignedserve.engine.request import Layout
from alignedserve.protocol.messages import Work
from alignedserve.types import BlockId, RequestKey


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Copies tokens `first` to `end` of the lender's block to host memory, before real time overwrites them."""

    lender: RequestKey
    index: int
    block: BlockId
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Renew:
    """The lender has a new block, with the content of the old one unless that was given up."""

    lender: RequestKey
    index: int
    old: BlockId
    new: BlockId


@dataclass(frozen=True, slots=True)
class Restore:
    """Copies tokens `first` to `end` of the lender's block back from host memory."""

    lender: RequestKey
    index: int
    block: BlockId
    first: int
    end: int


# Copies for blocks that two requests fill from both ends (`shared_ends.py`).
EndCopy = Checkpoint | Renew | Restore


class DecodePlan(msgspec.Struct):
    """A struct, because it is faster to create than a dataclass, and each iteration creates one."""

    # Requests that leave immediately without saving KV. They have no blocks any more.
    drops: list[RequestKey] = []
    # Requests with KV to copy here. They have their blocks. `pulled` or `pull_failed` follows.
    pulls: list[Work] = []
    # Prompts without KV that start. They have their blocks and may run in this iteration.
    new_prompts: list[Work] = []
    # How pulled and new requests fill their blocks, if not in the plain way.
    layouts: dict[RequestKey, Layout] = {}
    # Requests that compute all pending tokens, usually one, and sample the next. `sampled` follows.
    run: list[RequestKey] = []
    # Requests that compute a part of their pending tokens, and the number of these. `computed` follows.
    chunks: list[tuple[RequestKey, int]] = []
    # All requests to evict, including those of earlier plans.
    wants_evicted: list[RequestKey] = []
    # Copies before the iteration, in order.
    ends: list[EndCopy] = []
    # Seconds for which nothing runs unless an event occurs, because RT is about to arrive.
    hold_s: float = 0.0

    @property
    def goes_on(self) -> bool:
        """Whether the next plan can be made immediately, without waiting for a wake."""
        return bool(self.run or self.chunks or self.new_prompts)
