"""Block hashes, by which prompts with the same prefix are found (equal tokens, equal hash), and when it pays to wait
for such a prompt.

A block's hash covers all tokens up to its end, since its keys and values depend on them all, and the request's adapter.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

# In tokens. Computing fewer than these twice, beside other work, takes no longer than waiting for an iteration.
LEAST_COMMON = 64


def pays_to_wait(num_common: int, num_missing: int) -> bool:
    """`num_common` are those of the `num_missing` tokens which another prompt with the same prefix computes next."""
    return num_common >= max(LEAST_COMMON, num_missing / 2)


# No text begins with this byte in UTF-8.
_ADAPTER_FOLLOWS = b"\xff"


def block_hashes_of(tokens: Sequence[int], block_size: int, salt: str = "", adapter: str = "") -> list[bytes]:
    """The hashes of all full blocks. Only prompts with the same salt and the same adapter have hashes in common."""
    return BlockHasher(block_size, salt, adapter).block_hashes_of(tokens)


class BlockHasher:
    """Hashes a request's blocks one after the other, as its tokens come."""

    def __init__(self, block_size: int, salt: str = "", adapter: str = "") -> None:
        self._num_bytes = block_size * array("i").itemsize
        # Digests have one length, so that no salt can pass for another one with tokens or an adapter's name appended.
        first = hashlib.sha256(salt.encode()).digest()
        if adapter:
            first = hashlib.sha256(_ADAPTER_FOLLOWS + first + adapter.encode()).digest()
        self._digest = hashlib.sha256(first)

    def block_hashes_of(self, tokens: Sequence[int]) -> list[bytes]:
        """Returns the hashes of the next full blocks; tokens after them must be passed again."""
        data, size, names = array("i", tokens).tobytes(), self._num_bytes, []
        for end in range(size, len(data) + 1, size):
            self._digest.update(data[end - size : end])
            names.append(self._digest.digest())
        return names
