"""Virtual time. Nothing waits: the clock jumps from one event to the next, in order of time, then of request."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(order=True, slots=True)
class Timer:
    time_s: float
    serial: int
    action: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        """Safe to repeat, and after it went off."""
        self.action = None


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[Timer] = []
        self._num_asked = 0

    def at(self, time_s: float, action: Callable[[], None]) -> Timer:
        if not time_s >= self.now:
            raise ValueError(f"time_s={time_s}: must be at least now, {self.now}")
        self._num_asked += 1
        timer = Timer(time_s, self._num_asked, action)
        heapq.heappush(self._heap, timer)
        return timer

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        return self.at(self.now + delay_s, action)

    def step(self, until_s: float = float("inf")) -> bool:
        """Runs the next event, if there is one by then."""
        while self._heap and self._heap[0].time_s <= until_s:
            timer = heapq.heappop(self._heap)
            if timer.action is not None:
                self.now = timer.time_s
                self.num_events += 1
                timer.action()
                return True
        return False

    def run_until(self, time_s: float) -> None:
        """Everything up to then, and then it is that time."""
        while self.step(time_s):
            pass
        self.now = max(self.now, time_s)

    def run_while(self, goes_on: Callable[[], bool], limit_s: float) -> bool:
        """Until `goes_on` is false; False if it still is true at the limit, or nothing is left to happen."""
        while goes_on():
            if not self.step(limit_s):
                return False
        return True
