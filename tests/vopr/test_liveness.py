"""A run that goes in circles ends, instead of running for hours of real time."""

from __future__ import annotations

import pytest

from alignedserve.vopr.failures import Broken
from alignedserve.vopr.liveness import MAX_EVENTS, WINDOW_S, BoundedClock


def again_after(clock: BoundedClock, period_s: float) -> None:
    clock.after(period_s, lambda: again_after(clock, period_s))


def test_a_run_that_goes_in_circles_is_broken_once() -> None:
    clock = BoundedClock()
    again_after(clock, 0.5 * WINDOW_S / MAX_EVENTS)
    with pytest.raises(Broken, match="in circles"):
        clock.run_until(WINDOW_S)
    assert clock.num_events == MAX_EVENTS
    clock.run_until(2 * WINDOW_S)
    assert clock.now == 2 * WINDOW_S


def test_a_run_in_which_no_time_passes_is_broken() -> None:
    clock = BoundedClock()
    again_after(clock, 0.0)
    with pytest.raises(Broken, match="in circles"):
        clock.run_until(1.0)
    assert clock.now == 0.0


def test_many_events_are_no_circle_if_time_passes() -> None:
    clock = BoundedClock()
    again_after(clock, 1.5 * WINDOW_S / MAX_EVENTS)
    clock.run_until(5 * WINDOW_S)
    assert clock.num_events > 3 * MAX_EVENTS
