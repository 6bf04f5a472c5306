"""Block hashes, which identify common prefixes of prompts (equal tokens, equal hash), and when it pays to wait for a
prompt with the same prefix.

A block's hash covers all tokens up to its end and the request's adapter, because the block's keys and values depend on
all of them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

# In tokens. Computing fewer common tokens twice, beside other work, takes no longer than waiting for an iteration.
LEAST_COMMON = 64


def pays_to_wait(num_common: int, num_missing: int) -> bool:
    """Returns whether a prompt should wait for another one with the same prefix. `num_common`: those of its
    `num_missing` tokens that the other prompt computes next."""
    return num_common >= max(LEAST_COMMON, num_missing / 2)


# No text begins with this byte in UTF-8.
_ADAPTER_FOLLOWS = b"\xff"


def block_hashes_of(tokens: Sequence[int], block_size: int, salt: str = "", adapter: str = "") -> list[bytes]:
    """Returns the hashes of all full blocks. Only prompts with the same salt and the same adapter have hashes in
    common."""
    return BlockHasher(block_size, salt, adapter).block_hashes_of(tokens)


class BlockHasher:
    """Hashes a request's blocks one after the other, as its tokens arrive."""

    def __init__(self, block_size: int, salt: str = "", adapter: str = "") -> None:
        self._num_bytes = block_size * array("i").itemsize
        # All digests have the same length, so no salt can pass for another salt with tokens or an adapter's name
        # appended.
        first = hashlib.sha256(salt.encode()).digest()
        if adapter:
            first = hashlib.sha256(_ADAPTER_FOLLOWS + first + adapter.encode()).digest()
        self._digest = hashlib.sha256(first)

    def block_hashes_of(self, tokens: Sequence[int]) -> list[bytes]:
        """Returns the hashes of the next full blocks. Tokens after them must be passed again."""
        data, size, names = array("i", tokens).tobytes(), self._num_bytes, []
        for end in range(size, len(data) + 1, size):
            self._digest.update(data[end - size : end])
            names.append(self._digest.digest())
        return names
