"""Who gets to prefill first, and that everybody does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.deadlines import DEMOTION_S, Deadlines
from alignedserve.mix import DISCIPLINES
from alignedserve.router.entry import Entry, State
from alignedserve.router.fleet import Fleet
from alignedserve.router.queue import PrefillQueue, Room
from alignedserve.router.urgency import urgency_of
from tests.router.script import GATEWAY, request

ALIGNED, PRIORITY, FCFS = (DISCIPLINES[name] for name in ("aligned", "priority", "fcfs"))
ENDLESS = 1 << 40


def entry(key: int, deadlines: Deadlines, arrived_s: float = 0.0, num_cached: int = 0) -> Entry:
    return Entry(
        request(key),
        GATEWAY,
        State.QUEUED,
        arrived_s,
        num_cached=num_cached,
        arrived_s=arrived_s,
        deadlines=deadlines,
    )


def rt(key: int, first_due_s: float, arrived_s: float = 0.0) -> Entry:
    return entry(key, Deadlines(True, first_due_s, 0.1), arrived_s)


def be(key: int, job_due_s: float, arrived_s: float = 0.0, num_cached: int = 0) -> Entry:
    return entry(key, Deadlines(job_due_s=job_due_s), arrived_s, num_cached)


def push(queue: PrefillQueue, each: Entry) -> None:
    queue.push(each, urgency_of(each, queue.discipline, Fleet(), num_output=8))


def filled(entries: list[Entry], discipline: object = ALIGNED) -> PrefillQueue:
    queue = PrefillQueue(discipline)  # type: ignore[arg-type]
    for each in entries:
        push(queue, each)
    return queue


def order(queue: PrefillQueue, now: float, rt_room: int = ENDLESS, be_room: int = ENDLESS) -> list[int]:
    rooms = (Room(num_tokens, ENDLESS) for num_tokens in (rt_room, be_room))
    return [each.key for each in queue.startable(*rooms, now, lambda each: True)]


def test_the_objective_orders_real_time_and_the_window_best_effort() -> None:
    queue = filled([be(1, 900.0), rt(2, 9.0), be(3, 800.0), rt(4, 5.0), rt(5, 7.0)])
    assert order(queue, now=1.0) == [4, 5, 2, 3, 1]
    assert len(queue) == queue.num_tokens == 0


def test_who_has_lost_goes_behind_who_can_still_make_it() -> None:
    queue = filled([rt(1, 1.0), rt(2, 6.0), rt(3, 1.5 + DEMOTION_S)])
    assert order(queue, now=2.0) == [2, 1, 3]
    assert queue.num_demotions == 1


def test_a_begun_prompt_goes_before_others_of_best_effort() -> None:
    queue = filled([be(1, 500.0), be(2, 900.0, num_cached=4), rt(3, 5000.0)])
    assert order(queue, now=0.0) == [3, 2, 1]


def test_best_effort_does_not_use_up_real_times_window() -> None:
    """Each has six tokens to compute."""
    queue = filled([be(1, 9.0), be(2, 10.0), rt(3, 9.0), rt(4, 10.0)])
    assert order(queue, 0.0, rt_room=1, be_room=1) == [3, 1]
    assert order(queue, 0.0, rt_room=0, be_room=0) == []
    assert order(queue, 0.0, rt_room=7, be_room=0) == [4]


def test_static_priority_lets_best_effort_go_when_no_real_time_waits() -> None:
    entries = [be(1, 9.0, 0.0), rt(2, 9.0, 2.0), rt(3, 5.0, 3.0), be(4, 1.0, 4.0)]
    queue = filled(entries, PRIORITY)
    assert order(queue, 100.0, 6, 6) == [2]
    # the window is one, and both count
    assert order(queue, 100.0, 12, 12) == [3, 1]
    assert order(queue, 100.0) == [4]


def test_without_classes_it_is_the_order_of_arrival() -> None:
    entries = [be(1, 9.0, 3.0), rt(2, 9.0, 2.0), rt(3, 5.0, 4.0), be(4, 1.0, 1.0)]
    assert order(filled(entries, FCFS), 100.0) == [4, 2, 1, 3]


def test_what_the_pool_refuses_holds_up_its_class() -> None:
    queue = filled([rt(1, 5.0), be(2, 5.0)])
    queue.refused(be(3, 1.0))
    assert order(queue, 0.0) == [1]
    queue = filled([rt(1, 5.0), be(2, 5.0)])
    queue.refused(rt(3, 1.0))
    assert queue.is_rt_refused and order(queue, 0.0) == [2]
    queue.has_room_again()
    assert order(queue, 0.0) == [1]


times = st.floats(0.0, 50.0)


@given(
    st.lists(st.tuples(st.booleans(), times, times), max_size=40), st.lists(st.floats(0.0, 5.0), max_size=40)
)
def test_each_is_taken_once_and_never_before_a_better_one(
    arrivals: list[tuple[bool, float, float]], steps: list[float]
) -> None:
    """One at a time, while time passes: real time that can make it goes by its objective."""
    entries = {key: (rt if is_rt else be)(key, due_s) for key, (is_rt, due_s, _) in enumerate(arrivals, 1)}
    queue, now, taken = filled(list(entries.values())), 0.0, list[int]()
    for step_s in [*steps, *[1.0] * len(entries)]:
        now += step_s
        waiting = [each for key, each in entries.items() if key not in taken]
        for key in order(queue, now, rt_room=1, be_room=0):
            first = entries[key].deadlines.first_due_s
            others = [each.deadlines.first_due_s for each in waiting if each.is_rt and each.key != key]
            live = [due_s for due_s in others if due_s >= now]
            place = first if first >= now else first + DEMOTION_S
            assert all(place <= due_s for due_s in live)
            taken.append(key)
        taken += order(queue, now, rt_room=0, be_room=1)
    assert sorted(taken) == sorted(entries) and len(queue) == 0


@given(st.integers(2, 60))
def test_a_lost_one_ends_however_many_come_after_it(num_later: int) -> None:
    """One a second comes with an objective of two seconds; one a second goes."""
    queue, now, taken = filled([rt(1, 0.5)]), 1.0, list[int]()
    for key in range(2, num_later + 30):
        push(queue, rt(key, now + 2.0, now))
        taken += order(queue, now, rt_room=1)
        now += 1.0
    assert 1 in taken and taken.index(1) <= DEMOTION_S + 2
