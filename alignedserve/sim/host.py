"""The host of a simulated process: its clock, its timers, and its ends of connections.

A process that hangs neither acts nor answers: timers and messages wait until it wakes up. Nothing outlives a life of
the process: its timers don't fire any more, and its connections close.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from alignedserve.protocol.host import Link
from alignedserve.sim.clock import Clock, LocalClock, Timer


class SimHost:
    def __init__(self, clock: Clock) -> None:
        self.local_clock = LocalClock(clock)
        self.now = self.local_clock.now
        self.is_hung = False
        # Its open ends of connections, the oldest first.
        self.links: dict[Link, None] = {}
        self._clock = clock
        self._life = 0
        # Events that are handled when it wakes up, in this order.
        self._held: list[Callable[[], object]] = []

    def after(self, seconds: float, action: Callable[[], object]) -> Timer:
        return self._clock.after(seconds, partial(self._act_awake, self._life, action))

    def _act_awake(self, life: int, action: Callable[[], object]) -> None:
        if self.is_hung:
            self.when_awake(partial(self._act, life, action))
        elif self._life == life:
            action()

    def _act(self, life: int, action: Callable[[], object]) -> None:
        if self._life == life:
            action()

    def when_awake(self, action: Callable[[], object]) -> None:
        """Runs the action now, or when the process wakes up; never if it is killed before."""
        if self.is_hung:
            self._held.append(action)
        else:
            action()

    def hang(self) -> None:
        """Hangs the process and stops its clock, as when a machine is suspended. Safe to repeat."""
        self.is_hung = True
        self.local_clock.stand_still(True)

    def wake_up(self) -> None:
        """Safe to repeat."""
        self.is_hung = False
        self.local_clock.stand_still(False)
        held, self._held = self._held, []
        for action in held:
            action()

    def end_life(self) -> None:
        """Drops all timers."""
        self._life += 1

    def kill(self) -> None:
        """Ends the process. Its next life begins awake."""
        for link in list(self.links):
            link.close()
        self.end_life()
        self._held.clear()
        self.is_hung = False
        self.local_clock.stand_still(False)
