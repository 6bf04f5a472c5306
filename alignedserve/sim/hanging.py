"""A process that may hang: it neither acts nor answers, and events for it wait until it wakes up."""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.sim.clock import LocalClock


class CanHang:
    def __init__(self, local_clock: LocalClock) -> None:
        self.local_clock = local_clock
        self.is_hung = False
        # Events that are handled when it wakes up, in this order.
        self._held: list[Callable[[], None]] = []

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

    def when_awake(self, action: Callable[[], None]) -> None:
        """Runs the action now, or when the process wakes up; never if it is killed before."""
        if self.is_hung:
            self._held.append(action)
        else:
            action()

    def forget_held(self) -> None:
        """Drops all held events of a killed process. Its next life begins awake."""
        self._held.clear()
        self.is_hung = False
        self.local_clock.stand_still(False)
