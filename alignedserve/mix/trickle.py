"""What best effort (BE) is owed of an instance's time: a credit that grows while any of it is there. Pure."""

from __future__ import annotations


class Trickle:
    def __init__(self, share: float) -> None:
        self._share = share
        self._then_s: float | None = None
        self.credit_s = 0.0

    def pass_time(self, now: float, is_be_there: bool, most_s: float) -> None:
        """Since the last call. More than `most_s` is not kept for later."""
        if self._then_s is not None and is_be_there:
            self.credit_s += self._share * max(now - self._then_s, 0.0)
        self._then_s = now
        self.credit_s = min(self.credit_s, most_s)

    def spend(self, seconds: float) -> None:
        """On BE. What it got for nothing it does not owe."""
        self.credit_s = max(self.credit_s - seconds, 0.0)
