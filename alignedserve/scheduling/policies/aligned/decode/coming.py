"""Real time (RT) that is about to join: the router has announced it, or its KV is on its way. Pure.

While it is near, iterations are short, so that RT does not wait long for one that has just begun; and in the moment in
which its KV is on its way, none begins. Copies of best effort (BE), which RT's copies would have to wait for, do not
begin either.
"""

from __future__ import annotations

import math

# While KV of RT is on its way, no iteration begins for this share of the tightest recent objective.
HOLD = 0.25
# Copies of BE's KV wait for no longer than so many seconds.
MAX_BARRED_S = 0.5


class Coming:
    def __init__(self) -> None:
        # The time of the last boundary.
        self._now_s = 0.0
        self._is_pulled = False
        # The announced RT, by state: it will be offered in a moment.
        self._num_prefilling = 0
        self._num_ready = 0
        # Until when no iteration begins for the sake of RT, and until when iterations are short.
        self._hold_until_s = self._near_until_s = -math.inf
        # When BE might last be pulled.
        self._open_s = -math.inf

    def expect(self, num_prefilling: int, num_ready: int, now: float, tightest_s: float) -> None:
        if num_ready > self._num_ready:
            self._hold(now, tightest_s)
        self._num_prefilling, self._num_ready = num_prefilling, num_ready

    def look(self, is_pulled: bool, now: float) -> None:
        self._is_pulled, self._now_s = is_pulled, now

    def pulls(self, tightest_s: float) -> None:
        self._is_pulled = True
        self._hold(self._now_s, tightest_s)

    def _hold(self, now: float, tightest_s: float) -> None:
        self._hold_until_s, self._near_until_s = now + HOLD * tightest_s, now + tightest_s

    @property
    def is_near(self) -> bool:
        is_ready = self._num_ready and self._now_s < self._near_until_s
        return bool(self._is_pulled or self._num_prefilling or is_ready)

    @property
    def hold_s(self) -> float:
        """How many seconds an iteration should wait for RT's KV."""
        return self._hold_until_s - self._now_s if self._is_pulled or self._num_ready else 0.0

    def may_pull_be(self) -> bool:
        may = not self.is_near or self._now_s - self._open_s >= MAX_BARRED_S
        if may:
            self._open_s = self._now_s
        return may
