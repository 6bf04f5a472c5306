"""Virtual time. Nothing waits: the clock jumps from one event to the next, in order of time, then of request.

A process reads its `LocalClock`, which is monotonic but otherwise unreliable.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import msgspec


class SimTimer(msgspec.Struct):
    """An event's action. It is a struct, which is faster to create than a dataclass: there is one for each event."""

    action: Callable[[], object] | None

    def cancel(self) -> None:
        """Safe to repeat, even after the event."""
        self.action = None


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        # Entries (seconds, number, timer). Numbers are unique, so timers are never compared.
        self._heap: list[tuple[float, int, SimTimer]] = []
        self._num_asked = 0

    def at(self, time_s: float, action: Callable[[], object]) -> SimTimer:
        if not time_s >= self.now:
            raise ValueError(f"time_s={time_s}: must be at least now, {self.now}")
        self._num_asked += 1
        timer = SimTimer(action)
        heapq.heappush(self._heap, (time_s, self._num_asked, timer))
        return timer

    def after(self, delay_s: float, action: Callable[[], object]) -> SimTimer:
        return self.at(self.now + delay_s, action)

    def step(self, until_s: float = float("inf")) -> bool:
        """Runs the next event, if it is due by then. Returns whether it did."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            time_s, _, timer = heapq.heappop(heap)
            if (action := timer.action) is not None:
                self.now = time_s
                self.num_events += 1
                action()
                return True
        return False

    def run_until(self, time_s: float) -> None:
        """Runs all events up to this time, and then sets the time to it."""
        while self.step(time_s):
            pass
        self.now = max(self.now, time_s)

    def run_while(self, goes_on: Callable[[], bool], limit_s: float) -> bool:
        """Runs until `goes_on` returns False. Returns False if it is still true at the limit, or nothing is left to
        happen."""
        while goes_on():
            if not self.step(limit_s):
                return False
        return True


class LocalClock:
    """A process's monotonic clock. It shows the virtual time, unless it was told to run fast or slow, to jump ahead, or
    to stand still."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # The reading in seconds at the virtual time `_since_s`. After that it grows by `_rate` per second.
        self._base_s = 0.0
        self._since_s = 0.0
        self._rate = 1.0
        self._is_still = False

    def now(self) -> float:
        rate = 0.0 if self._is_still else self._rate
        return self._base_s + (self._clock.now - self._since_s) * rate

    def jump(self, seconds: float) -> None:
        self._rebase()
        self._base_s += seconds

    def run_at(self, rate: float) -> None:
        self._rebase()
        self._rate = rate

    def stand_still(self, is_still: bool) -> None:
        self._rebase()
        self._is_still = is_still

    def _rebase(self) -> None:
        self._base_s, self._since_s = self.now(), self._clock.now
