"""Copies within an instance, for blocks that two requests fill from both ends. The schedule lists them
(`decode_worker/shared_ends.py`), and the engine carries them out in order, before the iteration. When the worker evicts
a request, it adds a `Cut`."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.types import BlockId, RequestKey


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens `first` to `end` of the request's block with this index."""

    key: RequestKey
    index: int
    block: BlockId
    first: int
    end: int


class Checkpoint(_Part):
    """Copies them to host memory, before real time overwrites them."""


class Restore(_Part):
    """Copies them back from host memory."""


@dataclass(frozen=True, slots=True)
class Renew:
    """The request has a new block, with the content of the old one unless that was given up."""

    key: RequestKey
    index: int
    old: BlockId
    new: BlockId


@dataclass(frozen=True, slots=True)
class Cut:
    """The request, which does not run, has KV of no more than its first `num_tokens` tokens from here on."""

    key: RequestKey
    num_tokens: int


EndCopy = Checkpoint | Renew | Restore | Cut

# Host memory has room for the overwritten KV of one block in this many. When RT needs more, whole requests must leave.
BLOCKS_PER_PART = 4


def num_parts(num_blocks: int) -> int:
    """Returns the number of blocks that fit in the host memory of an instance with `num_blocks`."""
    return max(num_blocks // BLOCKS_PER_PART, 1)
