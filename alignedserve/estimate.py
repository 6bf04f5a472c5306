"""How long the next iteration will take: the cost model, corrected by how long the last ones took. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from alignedserve.cost import CostModel

# The pace goes so far towards what was measured of late.
_WEIGHT = 0.1
# That is the median of so many, an odd number: what was interrupted is not among them.
_WINDOW = 5
# A measurement that is further off than this, one way or the other, counts as this much.
_MOST_OFF = 4.0


class Estimate:
    def __init__(self, model: CostModel) -> None:
        self._model = model
        # measured over the model's own, of late
        self.pace = 1.0
        self._last: deque[float] = deque(maxlen=_WINDOW)

    def iteration(self, chunks: Sequence[tuple[int, int]], lengths: Sequence[int]) -> float:
        """As `CostModel.iteration`."""
        return self._model.iteration(chunks, lengths) * self.pace

    def took(self, predicted_s: float, seconds: float) -> None:
        """An iteration that `iteration` had foretold since the last one was reported."""
        if predicted_s <= 0:
            return
        off = min(max(seconds / predicted_s, 1 / _MOST_OFF), _MOST_OFF)
        self._last.append(off * self.pace)
        # with few to go by, the lower of two in the middle: the first may well have been slow
        self.pace += _WEIGHT * (statistics.median_low(self._last) - self.pace)
