"""What a schedule knows of KV that prompts may share. Pure; `prefix_cache.py` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from alignedserve.protocol.messages import Work


class PrefixLookup(Protocol):
    """The KV of prompts which an instance keeps, for others with the same prefix."""

    def block_hashes(self, work: Work) -> Sequence[bytes]:
        """Returns the hashes of the prompt's first blocks, those that it may share."""

    def num_found(self, block_hashes: Sequence[bytes]) -> int:
        """Returns the number of tokens which the instance has KV of, right now."""

    def take(self, work: Work, max_blocks: int | None = None) -> int:
        """Makes a prompt that starts hold its shared blocks, at most so many. Returns the number of tokens whose KV
        they hold."""


class NoPrefixCache:
    def block_hashes(self, work: Work) -> Sequence[bytes]:
        return ()

    def num_found(self, block_hashes: Sequence[bytes]) -> int:
        return 0

    def take(self, work: Work, max_blocks: int | None = None) -> int:
        return 0
