"""BE credit: the time of an instance that best effort (BE) is owed, which grows while any BE is there. Pure."""

from __future__ import annotations


class ServiceCredit:
    def __init__(self, share: float) -> None:
        self._share = share
        self._then_s: float | None = None
        self.seconds = 0.0

    def pass_time(self, now: float, is_be_there: bool, most_s: float) -> None:
        """Adds the time since the last call. No more than `most_s` is kept for later."""
        if self._then_s is not None and is_be_there:
            self.seconds += self._share * max(now - self._then_s, 0.0)
        self._then_s = now
        self.seconds = min(self.seconds, most_s)

    def spend(self, seconds: float) -> None:
        """Spends credit on BE; it never falls below zero, so BE owes nothing for time that it got beyond."""
        self.seconds = max(self.seconds - seconds, 0.0)
