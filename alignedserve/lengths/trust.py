"""Which source of predictions has been right, by the similarity of the nearest past prompt.

ALISE trusts neighbours above a fixed similarity. Which similarity suffices depends on the traffic, so it is learned
here: neighbours are trusted until another source has had smaller errors at this similarity.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from alignedserve.lengths.prediction import LEARNED, Source

NUM_BANDS = 25
# The order of LEARNED decides until this many errors of both sources are known.
MIN_ERRORS = 16
# The weight of a mean's newest value, once there are many.
FADING = 1 / 256
# A larger error counts as this: one prediction that was a hundred times too long says little about the next.
MAX_ERROR = 10.0


@dataclass
class Mean:
    """A plain mean at first. Later, older values fade."""

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
        """Returns the source to trust. `sources` must not be empty."""
        first, *others = [source for source in LEARNED if source in sources]
        for other in others:
            if self._is_better(other, first, band_of(similarity)):
                first = other
        return first

    def confidence(self, similarity: float, source: Source) -> float:
        """Returns 1 / (1 + the expected relative error)."""
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
