"""Which way of predicting has been right, for prompts as near to past ones as this one is.

ALISE trusts neighbours above a fixed similarity. How similar is similar enough depends on the traffic, so beyond that
threshold it is learned: neighbours are trusted until another way's errors at this similarity have been smaller.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from alignedserve.lengths.prediction import LEARNED, Source

NUM_BANDS = 25
# Until so many errors of both are known, the order of LEARNED decides.
MIN_ERRORS = 16
# The weight of a mean's newest value, once there are many.
FADING = 1 / 256
# An error counts no more than this: a prediction that was a hundred times too long says little about the next.
MAX_ERROR = 10.0


@dataclass
class Mean:
    """A plain mean at first; later the older values fade."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(1 / self.count, FADING)


class Trust:
    def __init__(self) -> None:
        # The mean relative error by (band of similarity, source).
        self.errors: dict[tuple[int, str], Mean] = {}

    def best(self, similarity: float, sources: Collection[Source]) -> Source:
        """Returns the source to trust; `sources` has at least one."""
        first, *others = [source for source in LEARNED if source in sources]
        for other in others:
            if self._is_better(other, first, band_of(similarity)):
                first = other
        return first

    def confidence(self, similarity: float, source: Source) -> float:
        """Returns 1 / (1 + the relative error to expect)."""
        known = self.errors.get((band_of(similarity), source))
        return 1 / (1 + known.value) if known else 0.5

    def learn(self, similarity: float, guesses: Mapping[Source, int], length: int) -> None:
        for source, guess in guesses.items():
            error = min(abs(guess - length) / length, MAX_ERROR)
            self.errors.setdefault((band_of(similarity), source), Mean()).add(error)

    def _is_better(self, one: Source, other: Source, band: int) -> bool:
        mine, others = self.errors.get((band, one)), self.errors.get((band, other))
        if not mine or not others or min(mine.count, others.count) < MIN_ERRORS:
            return False
        return mine.value < others.value


def band_of(similarity: float) -> int:
    return int(max(0.0, min(similarity, 1.0)) * NUM_BANDS)
