"""What a schedule is told of KV that prompts may share. Pure; `prefix_cache.py` knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from alignedserve.protocol.messages import Work


class PrefixLookup(Protocol):
    """KV that an instance keeps of prompts, for others that begin alike."""

    def names(self, work: Work) -> Sequence[bytes]:
        """Of a prompt's first blocks, those that it may share."""

    def num_found(self, names: Sequence[bytes]) -> int:
        """How many tokens there is KV of, right now."""

    def take(self, work: Work) -> int:
        """Likewise, of a prompt that starts: it holds these from here on."""


class NoPrefixCache:
    def names(self, work: Work) -> Sequence[bytes]:
        return ()

    def num_found(self, names: Sequence[bytes]) -> int:
        return 0

    def take(self, work: Work) -> int:
        return 0
