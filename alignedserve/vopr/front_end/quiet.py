"""When there were faults. Deadlines only apply while there are none."""

from __future__ import annotations

from alignedserve.sim.clock import Clock


class FaultTimes:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # The first and the last second of each fault.
        self._troubles: list[tuple[float, float]] = []

    @property
    def num_troubles(self) -> int:
        return len(self._troubles)

    def trouble(self, seconds: float) -> None:
        """Records a fault that lasts this long from now on."""
        self._troubles.append((self._clock.now, self._clock.now + seconds))

    def was_between(self, first_s: float, last_s: float) -> bool:
        """Returns whether there was no fault between these two seconds."""
        return not any(begin_s <= last_s and end_s >= first_s for begin_s, end_s in self._troubles)

    def lasts(self, seconds: float) -> bool:
        """Returns whether there has been no fault for this time."""
        return self.was_between(self._clock.now - seconds, self._clock.now)
