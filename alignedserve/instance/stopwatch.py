"""How long iterations take, and how much of that is not the engine's."""

from __future__ import annotations

from collections.abc import Callable


class Stopwatch:
    """An iteration which follows another at once begins where that one ends, so the time between them counts too."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun_s: float | None = None
        self._engine_begun_s = self._engine_s = 0.0
        # When the engine ended its last iteration, if something to compute was left then.
        self._engine_ended_s: float | None = None
        # Seconds between that and the beginning of the iteration after it: what it took to schedule that, copies that
        # it had to wait for included. None: the engine had had nothing to compute.
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
        """Ends the iteration. Returns how many seconds it took, and how many of these were outside the engine."""
        assert self._begun_s is not None
        now = self._clock()
        seconds, self._begun_s = now - self._begun_s, now
        return seconds, seconds - self._engine_s

    def stop(self) -> None:
        """Ends the iteration; the next one does not follow at once."""
        self._begun_s = None

    def idle(self) -> None:
        """There is nothing to compute, or to wait for."""
        self._engine_ended_s = None
