"""Prompts that begin alike: names for their beginnings (equal tokens, equal name), and when it pays to wait for them.

A block is named by all tokens up to its end, since its keys and values depend on them all.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

# Tokens. To compute fewer than these twice, beside others, takes no longer than to wait for an iteration.
LEAST_COMMON = 64


def pays_to_wait(num_common: int, num_missing: int) -> bool:
    """Tokens that are missing, and those of them that one which begins alike computes next."""
    return num_common >= max(LEAST_COMMON, num_missing / 2)


def block_hashes_of(tokens: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """Of each full block. Only prompts with the same salt have names in common."""
    return BlockHasher(block_size, salt).block_hashes_of(tokens)


class BlockHasher:
    """Names a request's blocks one after the other, as tokens come."""

    def __init__(self, block_size: int, salt: str = "") -> None:
        self._num_bytes = block_size * array("i").itemsize
        # of one length whatever the salt: none can pass for another one and tokens
        self._digest = hashlib.sha256(hashlib.sha256(salt.encode()).digest())

    def block_hashes_of(self, tokens: Sequence[int]) -> list[bytes]:
        """Of the next full blocks; tokens that fill none are left out, and are to come again."""
        data, size, names = array("i", tokens).tobytes(), self._num_bytes, []
        for end in range(size, len(data) + 1, size):
            self._digest.update(data[end - size : end])
            names.append(self._digest.digest())
        return names
