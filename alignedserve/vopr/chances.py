"""Random numbers that depend on the seed, on their purpose, and on how many were drawn for that purpose. So leaving out
an action changes little of the rest."""

from __future__ import annotations

import zlib
from collections import Counter

from alignedserve.sim.model import sample

_RESOLUTION = 50_000


class KeyedRandom:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._counts: Counter[str] = Counter()

    def next(self, of: str) -> float:
        """Returns the next number from 0 to 1 for this purpose."""
        self._counts[of] += 1
        return sample(zlib.crc32(of.encode()) ^ self._seed << 32, self._counts[of]) / _RESOLUTION
