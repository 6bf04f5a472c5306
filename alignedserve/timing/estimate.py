"""How long the next iteration will take: the cost model, corrected by how long the last ones took. Pure.

The cost model is of the engine. What an instance does beside it in an iteration (plans, messages, starting copies)
comes on top, and hardly depends on what is in the iteration.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from alignedserve.timing.cost import ChunkCosts, CostModel

# Both corrections go so far towards what was measured of late.
_WEIGHT = 0.1
# That is the median of so many, an odd number: what was interrupted is not among them.
_WINDOW = 5
# A measurement that is further off than this, one way or the other, counts as this much.
_MOST_OFF = 4.0


class Estimate:
    def __init__(self, model: CostModel) -> None:
        self._model = model
        # in the engine, measured over the model's own, of late
        self.pace = 1.0
        # outside of it, of late
        self.outside_s = 0.0
        self._last: deque[float] = deque(maxlen=_WINDOW)
        self._last_outside_s: deque[float] = deque(maxlen=_WINDOW)

    def iteration(self, chunks: Sequence[tuple[int, int]], lengths: Sequence[int]) -> float:
        """As `CostModel.iteration`."""
        return self.corrected(self._model.iteration(chunks, lengths))

    def chunks_together(self) -> ChunkCosts:
        """By the cost model alone: see `corrected`."""
        return self._model.chunks_together()

    def corrected(self, model_s: float) -> float:
        """What the cost model says, as `iteration` says it."""
        return model_s * self.pace + self.outside_s

    def took(self, predicted_s: float, seconds: float, outside_s: float = 0.0) -> None:
        """An iteration that `iteration` had foretold since the last one was reported, and what part of it was outside
        the engine."""
        inside_s = predicted_s - self.outside_s
        if inside_s <= 0:
            return
        off = min(max((seconds - outside_s) / inside_s, 1 / _MOST_OFF), _MOST_OFF)
        self._last.append(off * self.pace)
        self._last_outside_s.append(min(outside_s, _MOST_OFF * max(self.outside_s, inside_s)))
        # with few to go by, the lower of two in the middle: the first may well have been slow
        self.pace += _WEIGHT * (statistics.median_low(self._last) - self.pace)
        self.outside_s += _WEIGHT * (statistics.median_low(self._last_outside_s) - self.outside_s)
