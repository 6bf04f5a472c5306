"""A schedule's view of KV that prompts may share. Pure; `prefix_cache.py` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from alignedserve.protocol.messages import Work


class PrefixLookup(Protocol):
    """The KV that an instance keeps for prompts with the same prefix."""

    def block_hashes(self, work: Work) -> Sequence[bytes]:
        """Returns the hashes of the prompt's first blocks, which it may share."""

    def num_found(self, block_hashes: Sequence[bytes]) -> int:
        """Returns the number of tokens with KV on the instance now."""

    def take(self, work: Work, max_blocks: int | None = None) -> int:
        """Has a starting prompt hold its shared blocks, at most `max_blocks`. Returns the number of tokens that they
        cover."""


class NoPrefixCache:
    def block_hashes(self, work: Work) -> Sequence[bytes]:
        return ()

    def num_found(self, block_hashes: Sequence[bytes]) -> int:
        return 0

    def take(self, work: Work, max_blocks: int | None = None) -> int:
        return 0
