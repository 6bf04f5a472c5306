"""Names for the beginnings of prompts: equal tokens, equal name.

A block is named by all tokens up to its end, since its keys and values depend on them all.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def names_of(tokens: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """Of each full block. Only prompts with the same salt have names in common."""
    data = array("i", tokens).tobytes()
    num_bytes = block_size * array("i").itemsize
    # of one length whatever the salt: none can pass for another one and tokens
    digest = hashlib.sha256(hashlib.sha256(salt.encode()).digest())
    names = []
    for end in range(num_bytes, len(data) + 1, num_bytes):
        digest.update(data[end - num_bytes : end])
        names.append(digest.digest())
    return names
