"""Chances that depend on the seed, on what they are for, and on how many there were for that: leaving out an action
changes little of the rest."""

from __future__ import annotations

import zlib
from collections import Counter

from alignedserve.sim.model import sample

_RESOLUTION = 50_000


class Chances:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._counts: Counter[str] = Counter()

    def next(self, of: str) -> float:
        """Returns a number from 0 to 1 for the next thing of this name."""
        self._counts[of] += 1
        return sample(zlib.crc32(of.encode()) ^ self._seed << 32, self._counts[of]) / _RESOLUTION
