"""How long iterations take, how much of that is outside the engine, and how long the planned one will take."""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.timing.cost import IterationLoad
from alignedserve.timing.estimate import Estimate


class Stopwatch:
    """If an iteration follows immediately, it begins where the last one ended, so the time in between counts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun_s: float | None = None
        self._engine_begun_s = self._engine_s = 0.0
        # When the engine ended its last iteration, if there was more to compute.
        self._engine_ended_s: float | None = None
        # Seconds from then to the beginning of the next iteration: scheduling, including copies that it waited for.
        # None if the engine had nothing to compute.
        self.scheduling_s: float | None = None

    def begin(self) -> None:
        if self._begun_s is None:
            self._begun_s = self._clock()
        self._engine_s = 0.0

    def engine_begins(self) -> None:
        now = self._engine_begun_s = self._clock()
        self.scheduling_s = None if self._engine_ended_s is None else now - self._engine_ended_s

    def engine_ends(self) -> None:
        now = self._engine_ended_s = self._clock()
        self._engine_s += now - self._engine_begun_s

    def lap(self) -> tuple[float, float]:
        """Ends the iteration. Returns its seconds, and how many of them were outside the engine."""
        assert self._begun_s is not None
        now = self._clock()
        seconds, self._begun_s = now - self._begun_s, now
        return seconds, seconds - self._engine_s

    def stop(self) -> None:
        """Ends the iteration. The next one does not follow immediately."""
        self._begun_s = None

    def idle(self) -> None:
        """There is nothing to compute or wait for."""
        self._engine_ended_s = None


class IterationForecast:
    """How long the planned iteration will take, if there is a cost model. Pure."""

    def __init__(self, estimate: Estimate | None) -> None:
        self._estimate = estimate
        # Predicted seconds of the last planned iteration.
        self._predicted_s = 0.0

    def plan(self, load: IterationLoad) -> None:
        """Predicts the planned iteration, which has something to compute."""
        if self._estimate:
            self._predicted_s = self._estimate.iteration(*load)

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
