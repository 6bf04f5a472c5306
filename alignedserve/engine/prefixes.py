"""Names for the beginnings of prompts: equal tokens, equal name. A block is named by all tokens up to its end, since its
keys and values depend on them all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def names_of(tokens: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """Of each full block. Only prompts with the same salt have names in common."""
    end = len(tokens) // block_size * block_size
    data = np.asarray(tokens[:end], dtype=np.int32).tobytes()
    num_bytes = block_size * np.int32().nbytes
    # of one length whatever the salt: none can pass for another one and tokens
    digest = hashlib.sha256(hashlib.sha256(salt.encode()).digest())
    names = []
    for start in range(0, len(data), num_bytes):
        digest.update(data[start : start + num_bytes])
        names.append(digest.digest())
    return names
