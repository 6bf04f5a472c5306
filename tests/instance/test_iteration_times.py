from __future__ import annotations

from alignedserve.instance.iteration_times import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_is_between_two_iterations_counts_to_the_second_unless_it_waited() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    def iterate(before_s: float, engine_s: float) -> tuple[float, float]:
        clock.now += before_s
        watch.begin()
        clock.now += 1.0
        watch.engine_begins()
        clock.now += engine_s
        watch.engine_ends()
        return watch.lap()

    assert iterate(50.0, 8.0) == (9.0, 1.0)
    assert iterate(2.0, 16.0) == (19.0, 3.0)
    watch.stop()
    assert iterate(50.0, 4.0) == (5.0, 1.0)


def test_scheduling_ends_when_the_engine_begins_and_idleness_is_none_of_it() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    def iterate(before_s: float) -> float | None:
        clock.now += before_s
        watch.begin()
        watch.engine_begins()
        clock.now += 8.0
        watch.engine_ends()
        return watch.scheduling_s

    assert iterate(1.0) is None, "there was no iteration before it"
    assert iterate(2.0) == 2.0
    watch.stop()
    assert iterate(3.0) == 3.0, "it waited for a copy"
    watch.stop()
    watch.idle()
    assert iterate(50.0) is None
