"""Carries copies over links in virtual time: the clock's timers around `SharedLinks`, one for each flow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from alignedserve.sim.clock import Clock, SimTimer
from alignedserve.sim.links import Crossing, Flow, SharedLinks
from alignedserve.timing.cost import CopyChannel


class Carrier:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._links = SharedLinks()
        # For each flow that has not ended, the timer of its first byte, and after that of its last byte.
        self._timers: dict[Flow, SimTimer] = {}

    def start(
        self, num_bytes: int, channel: CopyChannel, crossings: Sequence[Crossing], arrived: Callable[[], None]
    ) -> Flow:
        """Starts a flow. `arrived` is called when the last byte has arrived, unless the flow is stopped before."""
        flow = Flow(num_bytes, channel, crossings, begun_s=self._clock.now)
        self._timers[flow] = self._clock.at(flow.first_byte_s, partial(self._join, flow, arrived))
        return flow

    def stop(self, flow: Flow) -> None:
        self._timers.pop(flow).cancel()
        self._move_ends(self._links.leave(flow, self._clock.now))

    def check_idle(self) -> None:
        """Raises RuntimeError if a copy is on its way."""
        if self._timers:
            raise RuntimeError(f"idle, but {len(self._timers)} copies are on their way")

    def _join(self, flow: Flow, arrived: Callable[[], None]) -> None:
        self._timers[flow] = SimTimer(partial(self._arrive, flow, arrived))
        self._move_ends(self._links.join(flow, self._clock.now))

    def _arrive(self, flow: Flow, arrived: Callable[[], None]) -> None:
        self.stop(flow)
        arrived()

    def _move_ends(self, flows: Iterable[Flow]) -> None:
        for flow in flows:
            timer = self._timers[flow]
            action = timer.action
            assert action
            timer.cancel()
            self._timers[flow] = self._clock.at(flow.end_s, action)
