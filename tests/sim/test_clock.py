from __future__ import annotations

import pytest

from alignedserve.sim.clock import Clock


def test_events_come_in_order_of_time_then_of_asking() -> None:
    clock, seen = Clock(), []
    for time_s, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        clock.at(time_s, lambda time_s=time_s, name=name: seen.append((clock.now, time_s, name)))  # type: ignore[misc]
    clock.run_until(5.0)
    assert seen == [(1.0, 1.0, "a"), (1.0, 1.0, "b"), (2.0, 2.0, "c"), (2.0, 2.0, "d")]
    assert clock.now == 5.0


def test_an_event_can_ask_for_more() -> None:
    clock, ticks = Clock(), []

    def tick() -> None:
        ticks.append(clock.now)
        clock.after(1.0, tick)

    clock.after(1.0, tick)
    clock.run_until(3.5)
    assert ticks == [1.0, 2.0, 3.0]
    assert clock.run_while(lambda: len(ticks) < 5, limit_s=10.0)
    assert clock.now == 5.0


def test_a_cancelled_timer_does_not_go_off() -> None:
    clock, seen = Clock(), []
    timer = clock.after(1.0, lambda: seen.append("cancelled"))
    clock.after(2.0, lambda: seen.append("kept"))
    timer.cancel()
    timer.cancel()
    clock.run_until(3.0)
    assert seen == ["kept"]


def test_running_out_of_events_or_time_is_told() -> None:
    clock = Clock()
    assert not clock.run_while(lambda: True, limit_s=1.0)
    clock.after(5.0, lambda: None)
    assert not clock.run_while(lambda: True, limit_s=1.0)
    assert clock.num_events == 0


def test_the_past_is_refused() -> None:
    clock = Clock()
    clock.run_until(2.0)
    with pytest.raises(ValueError, match="time_s=1.0: must be at least now, 2.0"):
        clock.at(1.0, lambda: None)
    with pytest.raises(ValueError, match="nan"):
        clock.at(float("nan"), lambda: None)
