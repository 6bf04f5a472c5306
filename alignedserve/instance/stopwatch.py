"""How long iterations take, and how much of that is not the engine's."""

from __future__ import annotations

from collections.abc import Callable


class Stopwatch:
    """An iteration which follows another at once begins where that one ends, so the time between them counts too."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun_s: float | None = None
        self._engine_begun_s = self._engine_s = 0.0

    def begin(self) -> None:
        if self._begun_s is None:
            self._begun_s = self._clock()
        self._engine_s = 0.0

    def engine_begins(self) -> None:
        self._engine_begun_s = self._clock()

    def engine_ends(self) -> None:
        self._engine_s += self._clock() - self._engine_begun_s

    def lap(self) -> tuple[float, float]:
        """Ends the iteration. Returns how many seconds it took, and how many of these were outside the engine."""
        assert self._begun_s is not None
        now = self._clock()
        seconds, self._begun_s = now - self._begun_s, now
        return seconds, seconds - self._engine_s

    def stop(self) -> None:
        """Ends the iteration; the next one does not follow at once."""
        self._begun_s = None
