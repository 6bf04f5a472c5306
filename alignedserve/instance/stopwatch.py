"""Measures how long iterations take, and how much of that is outside the engine."""

from __future__ import annotations

from collections.abc import Callable


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
