"""How long the planned iteration will take, if there is a cost model. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.timing.estimate import Estimate


class Forecast:
    def __init__(self, estimate: Estimate | None) -> None:
        self._estimate = estimate
        # Predicted seconds of the last planned iteration.
        self._predicted_s = 0.0

    def plan(self, chunks: Sequence[tuple[int, int]], lengths: Sequence[int], num_restored: int = 0) -> None:
        """Predicts the planned iteration, which has something to compute."""
        if self._estimate:
            self._predicted_s = self._estimate.iteration(chunks, lengths, num_restored)

    def took(self, seconds: float, outside_s: float = 0.0) -> None:
        """Reports the duration of the last plan's iteration, and its seconds outside the engine. This corrects later
        predictions."""
        if self._estimate:
            self._estimate.took(self._predicted_s, seconds, outside_s)

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """Reports a copy from the pool, which corrects later predictions."""
        if self._estimate:
            self._estimate.fetched(num_bytes, seconds)

    @property
    def pace(self) -> float:
        """Ratio of measured to predicted time of recent iterations."""
        return self._estimate.pace if self._estimate else 1.0

    @property
    def last_overrun(self) -> float:
        return self._estimate.last_overrun if self._estimate else 1.0

    @property
    def outside_s(self) -> float:
        """Recent seconds per iteration in which the engine computes nothing."""
        return self._estimate.outside_s if self._estimate else 0.0
