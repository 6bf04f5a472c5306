"""Which requests are prefilled first, and that all of them are."""

from __future__ import annotations

import math
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from alignedserve.router.clock import with_first_token
from alignedserve.router.config import RouterConfig
from alignedserve.router.queues import OTHERS
from alignedserve.router.requests import Phase, RequestState
from alignedserve.router.router import Router
from alignedserve.scheduling import routing
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.island import Assign, Room
from alignedserve.scheduling.policies.aligned.router.prompts import Savable
from alignedserve.scheduling.routing import BEST_EFFORT, REAL_TIME
from alignedserve.timing.cost import LinearCost
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import Epoch, RequestKey
from tests.router.script import GATEWAY, hello, request
from tests.sim.islands import COST

ENDLESS = 1 << 40


def state(key: int, deadlines: Deadlines, arrived_s: float = 0.0, num_cached: int = 0) -> RequestState:
    return RequestState(
        request(key),
        GATEWAY,
        Phase.QUEUED,
        arrived_s,
        num_cached=num_cached,
        arrived_s=arrived_s,
        deadlines=deadlines,
    )


def rt(key: int, first_due_s: float, arrived_s: float = 0.0, num_cached: int = 0) -> RequestState:
    return state(key, Deadlines(True, first_due_s, 0.1), arrived_s, num_cached)


def be(key: int, job_due_s: float, arrived_s: float = 0.0, num_cached: int = 0) -> RequestState:
    return state(key, Deadlines(job_due_s=job_due_s), arrived_s, num_cached)


def filled(states: list[RequestState], policy: str = "aligned") -> Router:
    router = Router(RouterConfig(link="host"), Epoch(1), SchedulingConfig(policy))
    for each in states:
        push(router, each)
    return router


def push(router: Router, each: RequestState) -> None:
    router.state.requests.add(each)
    router.state.prefill_queue.push(each, router.policy.urgency(each, router.state.island))


def order(router: Router, now: float, rt_room: int = ENDLESS, be_room: int = ENDLESS) -> list[RequestKey]:
    """Of both lines, each with room for so many tokens."""
    router.state.clock.now = now
    rooms = {REAL_TIME: rt_room, BEST_EFFORT: be_room}
    return [
        each.key
        for line, num_tokens in rooms.items()
        for each in routing.start_line(router.state.island, line, Room(num_tokens, ENDLESS))
    ]


def started(router: Router, num_tokens: int = 2 * ENDLESS) -> list[RequestKey]:
    """As the policy has it, with a window of so many tokens."""
    view = router.state.cluster.add(hello("prefill-0"))
    limits = replace(view.hello.limits, max_num_batched_tokens=num_tokens // 2)
    view.hello = replace(view.hello, limits=limits)
    found = [each.key for each in router.policy.start(router.state.island)]
    router.state.cluster.remove(view.instance_id)
    return found


def test_the_objective_orders_real_time_and_the_window_best_effort() -> None:
    router = filled([be(1, 900.0), rt(2, 9.0), be(3, 800.0), rt(4, 5.0), rt(5, 7.0)])
    assert order(router, now=1.0) == [4, 5, 2, 3, 1]
    assert len(router.state.prefill_queue) == router.state.prefill_queue.num_tokens == 0


def test_who_has_lost_goes_behind_all_who_can_still_make_it() -> None:
    router = filled([rt(1, 1.5), rt(2, 6.0), rt(3, 100.0), rt(4, 1.0)])
    assert order(router, now=2.0) == [2, 3, 4, 1]
    assert router.state.prefill_queue.num_demotions == 2


def test_a_begun_prompt_goes_before_others_of_best_effort() -> None:
    router = filled([be(1, 500.0), be(2, 900.0, num_cached=4), rt(3, 5000.0)])
    assert order(router, now=0.0) == [3, 2, 1]


def test_a_begun_prompt_of_real_time_waits_for_those_that_are_due_before_it() -> None:
    router = filled([rt(1, 500.0, num_cached=4), rt(2, 400.0)])
    assert order(router, now=0.0) == [2, 1]


def test_best_effort_does_not_use_up_real_times_window() -> None:
    """Each has six tokens to compute."""
    router = filled([be(1, 9.0), be(2, 10.0), rt(3, 9.0), rt(4, 10.0)])
    assert order(router, 0.0, rt_room=1, be_room=1) == [3, 1]
    assert order(router, 0.0, rt_room=0, be_room=0) == []
    assert order(router, 0.0, rt_room=7, be_room=0) == [4]


def test_static_priority_lets_best_effort_go_when_no_real_time_waits() -> None:
    states = [be(1, 9.0, 0.0), rt(2, 9.0, 2.0), rt(3, 5.0, 3.0), be(4, 1.0, 4.0)]
    router = filled(states, "priority")
    assert started(router, num_tokens=6) == [2]
    # the window is one, and both count
    assert started(router, num_tokens=12) == [3, 1]
    assert started(router) == [4]


def test_without_classes_it_is_the_order_of_arrival() -> None:
    states = [be(1, 9.0, 3.0), rt(2, 9.0, 2.0), rt(3, 5.0, 4.0), be(4, 1.0, 1.0)]
    assert started(filled(states, "fcfs")) == [4, 2, 1, 3]


def test_what_the_pool_refuses_holds_up_its_class() -> None:
    router = filled([rt(1, 5.0), be(2, 5.0)])
    router.state.prefill_queue.refused(be(3, 1.0))
    assert order(router, 0.0) == [1]
    router = filled([rt(1, 5.0), be(2, 5.0)])
    router.state.prefill_queue.refused(rt(3, 1.0))
    assert router.state.prefill_queue.is_refused(REAL_TIME) and order(router, 0.0) == [2]
    router.state.prefill_queue.clear_refusals()
    assert order(router, 0.0) == [1]


times = st.floats(0.0, 50.0)


@given(
    st.lists(st.tuples(st.booleans(), times, times), max_size=40), st.lists(st.floats(0.0, 5.0), max_size=40)
)
def test_each_is_taken_once_and_never_before_a_better_one(
    arrivals: list[tuple[bool, float, float]], steps: list[float]
) -> None:
    """One at a time, while time passes: real time that can make it goes by its objective."""
    states = {key: (rt if is_rt else be)(key, due_s) for key, (is_rt, due_s, _) in enumerate(arrivals, 1)}
    router, now, taken, num_beside = filled(list(states.values())), 0.0, list[int](), 0
    for step_s in [*steps, *[1.0] * len(states)]:
        now += step_s
        waiting = [each for key, each in states.items() if key not in taken]
        for key in order(router, now, rt_room=1, be_room=0):
            first = states[key].deadlines.first_due_s
            others = [each.deadlines.first_due_s for each in waiting if each.is_rt and each.key != key]
            live = [due_s for due_s in others if due_s >= now]
            lost = [due_s for due_s in others if due_s < now]
            if first < now:
                # six tokens, and a share of those that went before it
                assert not live or num_beside >= OTHERS * 6
                num_beside = max(num_beside - OTHERS * 6, 0)
            else:
                assert all(first <= due_s for due_s in live) and (not lost or num_beside < OTHERS * 6)
                num_beside += 6 if lost else 0
            taken.append(key)
        taken += order(router, now, rt_room=0, be_room=1)
    assert sorted(taken) == sorted(states) and len(router.state.prefill_queue) == 0


def test_a_lost_one_has_its_turn_however_many_come_after_it() -> None:
    """One a second comes with an objective of two seconds, and one a second goes."""
    router, now, taken = filled([rt(1, 0.5)]), 1.0, list[int]()
    for key in range(2, 40):
        push(router, rt(key, now + 2.0, now))
        taken += order(router, now, rt_room=1, be_room=0)
        now += 1.0
    assert taken.index(1) == OTHERS


def test_a_long_one_waits_for_as_much_longer() -> None:
    router, now, taken = filled([]), 1.0, list[int]()
    long = rt(1, 0.5)
    long.request = request(1, num_prompt=18)
    push(router, long)
    for key in range(2, 80):
        push(router, rt(key, now + 2.0, now))
        taken += order(router, now, rt_room=1, be_room=0)
        now += 1.0
    assert taken.index(1) == 3 * OTHERS


def test_a_lost_one_keeps_its_turn_when_the_pool_has_no_room() -> None:
    router, now = filled([rt(1, 0.5)]), 1.0
    for key in range(2, 30):
        push(router, rt(key, 1e6))
    while order(router, now, rt_room=1, be_room=0) != [1]:
        pass
    state = router.state.requests[RequestKey(1)]
    router.state.prefill_queue.refused(state)
    router.state.prefill_queue.push(state, router.policy.urgency(state, router.state.island))
    assert order(router, now, rt_room=1, be_room=0) == []
    router.state.prefill_queue.clear_refusals()
    assert order(router, now, rt_room=1, be_room=0) == [1]
    # or room is made for it at once
    router.state.prefill_queue.push(state, router.policy.urgency(state, router.state.island))
    assert order(router, now, rt_room=1, be_room=0) == [1]
    assert router.state.prefill_queue.num_demotions == 1
    assert order(router, now, rt_room=1, be_room=0) != [1]


def test_what_others_started_beside_a_lost_one_that_left_is_not_for_the_next() -> None:
    long, short = rt(1, 0.5), rt(2, 0.6)
    long.request = request(1, num_prompt=600)
    router = filled([long, short, *(rt(key, 1e6) for key in range(3, 60))])
    for _ in range(2 * OTHERS):
        assert order(router, 1.0, rt_room=1, be_room=0) not in ([1], [2])
    router.state.prefill_queue.discard(long)
    assert [*(order(router, 1.0, rt_room=1, be_room=0)), *order(router, 1.0, rt_room=1, be_room=0)][0] == 2
    push(router, rt(60, 0.7))
    assert order(router, 1.0, rt_room=1, be_room=0) != [60]


def test_an_answer_that_was_begun_is_not_lost() -> None:
    broken_off = rt(1, 0.5)
    broken_off.output = [7, 8]
    router = filled([rt(2, 100.0), broken_off])
    assert order(router, now=50.0) == [1, 2]
    begun = be(3, job_due_s=1.0, num_cached=4)
    router = filled([be(4, job_due_s=math.inf), be(5, job_due_s=100.0), begun])
    assert order(router, now=50.0) == [3, 4, 5]


def test_one_that_was_begun_goes_before_a_lost_one_whose_turn_it_is() -> None:
    """What the pool holds of it counts as under way, so that a lost one might not be started beside it."""
    router = filled([be(key, job_due_s=1.0) for key in (1, 2)])
    for key in range(3, 3 + OTHERS):
        push(router, be(key, 1e6))
        order(router, now=50.0, rt_room=0, be_room=1)
    push(router, be(30, job_due_s=1.0, num_cached=4))
    assert order(router, now=50.0, rt_room=0, be_room=1) == [30]
    assert order(router, now=50.0, rt_room=0, be_room=1) == [1]


def test_what_the_pool_refuses_does_not_count_as_started_beside_a_lost_one() -> None:
    router = filled([rt(1, 0.5), *(rt(key, 1e6 + key) for key in range(2, 2 + OTHERS))])
    for _ in range(2 * OTHERS):
        (key,) = order(router, 1.0, rt_room=1, be_room=0)
        assert key == 2
        refused = router.state.requests[key]
        router.state.prefill_queue.push(refused, router.policy.urgency(refused, router.state.island))
    started = [each for _ in range(OTHERS) for each in order(router, 1.0, rt_room=1, be_room=0)]
    assert started == [*range(2, 2 + OTHERS)]
    assert order(router, 1.0, rt_room=1, be_room=0) == [1]


def test_a_lost_one_stands_among_those_without_an_objective_as_if_it_came_later() -> None:
    """Where no other can still make its objective."""
    lost, soon = be(1, job_due_s=1.0), be(2, math.inf, arrived_s=0.5)
    router = filled([soon, lost, *(be(key, math.inf, arrived_s=50.0 * key) for key in (3, 4))])
    assert order(router, now=500.0) == [2, 1, 3, 4]
    router = Router(RouterConfig(link="host"), Epoch(1), SchedulingConfig("accelgen"))
    for each in (soon, rt(1, 0.5)):
        push(router, each)
    assert next(iter(router.policy.start(router.state.island)), None) is None, "there is no instance"
    assert router.state.prefill_queue.first(0, now=500.0) is router.state.requests[RequestKey(1)]


def test_a_stream_that_was_broken_off_is_not_lost_under_accelgen() -> None:
    broken_off = rt(1, 0.5)
    broken_off.output = [7, 8]
    router = filled([rt(2, 100.0), broken_off], "accelgen")
    assert router.state.prefill_queue.first(0, now=50.0) is broken_off


def test_accelgen_leaves_a_document_that_gets_no_answer_no_time_for_one() -> None:
    router = Router(RouterConfig(link="host"), Epoch(1), SchedulingConfig("accelgen"))
    for name in ("prefill-0", "decode-0"):
        router.state.cluster.add(replace(hello(name), cost=COST))
    document = be(1, job_due_s=9.0)
    document.request = replace(document.request, pooling="last")
    router.state.requests.add(document)
    urgency = router.policy.urgency(document, router.state.island)
    assert urgency.start_s == 9.0 - router.state.cluster.prefill_s(0, document.num_tokens)


# ---- more than can be in time ----------------------------------------------------------------------------------------


def with_prompts(*prompts: tuple[int, float]) -> Router:
    """One prefill instance, and prompts of real time of so many tokens, each due then."""
    router = Router(RouterConfig(link="host"), Epoch(1), SchedulingConfig())
    router.state.cluster.add(replace(hello("prefill-0"), cost=COST))
    for key, (num_prompt, due_s) in enumerate(prompts, 1):
        each = rt(key, due_s)
        each.request = request(key, num_prompt)
        push(router, each)
    return router


def alone_s(num_tokens: int) -> float:
    return with_prompts().state.cluster.prefill_s(0, num_tokens)


def started_first(router: Router) -> RequestKey:
    return next(iter(router.policy.start(router.state.island))).key


def test_those_that_let_most_be_in_time_start_first() -> None:
    """The long one has to begin first, and there is time for all, or for both others, or for them alone."""
    long_s, short_s = alone_s(320), alone_s(32)
    for due_s, expected in (
        (long_s + 2 * short_s + 0.01, 1),
        (long_s + short_s, 2),
        (long_s - 0.01, 2),
    ):
        assert started_first(with_prompts((320, due_s), (32, due_s + 0.001), (32, due_s + 0.002))) == expected


def test_a_lost_one_and_one_without_an_objective_have_their_turn_among_those_that_are_chosen() -> None:
    router = with_prompts(*((32, 1e6) for _ in range(2 * OTHERS)), (32, -1.0))
    whenever = state(100, Deadlines(True), arrived_s=0.5)
    push(router, whenever)
    found = [each.key for each in Savable().start(router.state.island, Room(ENDLESS, ENDLESS), 0)]
    assert found.index(RequestKey(100)) == 0 and found.index(RequestKey(2 * OTHERS + 1)) == OTHERS + 1
    assert len(found) == len({*found}) == 2 * OTHERS + 2


def test_a_prompt_that_cannot_be_in_time_starts_only_where_an_instance_has_none() -> None:
    """It is not lost yet, but the prompt ahead takes longer. One without an objective starts anyway."""
    router = with_prompts((32, alone_s(32) + 0.01))
    (view,) = router.state.cluster.prefills
    view.pending.put(RequestKey(100), 320, True, "")

    def num_started(room: int, least: int) -> int:
        return len([*Savable().start(router.state.island, Room(room, room), least)])

    assert num_started(ENDLESS, 0) == 0
    push(router, state(2, Deadlines(True), arrived_s=-1.0))
    assert num_started(ENDLESS, 0) == 1, "the one without an objective"
    assert num_started(0, 1) == 1, "an instance has none"


def test_prompts_are_chosen_of_the_owner_that_has_the_turn() -> None:
    router = with_prompts()
    for key in range(1, 7):
        made = rt(key, 1e6)
        made.request = replace(made.request, owner="a" if key <= 3 else "b")
        router.state.prefill_queue.opened(made)
        push(router, made)
    starting = Savable().start(router.state.island, Room(ENDLESS, ENDLESS), 0)
    owners = [each.owner for each in starting]
    assert [{*owners[at : at + 2]} for at in (0, 2, 4)] == [{"a", "b"}] * 3, owners


def at_a_quarter_of_the_pace() -> Savable:
    """One of two is always left."""
    savable, router = Savable(), with_prompts((32, 1e6), (32, 1e6))
    for number in range(10):
        router.state.clock.now = number * 4 * alone_s(32)
        (request,) = savable.start(router.state.island, Room(1, 1), 0)
        each = router.state.requests[request.key]
        router.state.prefill_queue.push(each, router.policy.urgency(each, router.state.island))
    assert savable.slowdown == pytest.approx(4.0)
    # Others wait in another queue from here on.
    savable.forget()
    return savable


def test_prompts_are_as_fast_as_they_were_seen_to_be() -> None:
    """There is time for one of three at a quarter of the pace, for all of them at the full one."""
    due_s = 6 * alone_s(32)
    island = with_prompts(*((32, due_s) for _ in range(3))).state.island
    assert len(Savable()._in_time(island)) == 3
    assert len(at_a_quarter_of_the_pace()._in_time(island)) == 1


def test_an_instance_that_had_nothing_to_do_was_not_slow() -> None:
    savable = at_a_quarter_of_the_pace()
    for now in (100.0, 1e5, 2e5):
        router = with_prompts((32, 1e6))
        router.state.clock.now = now
        assert len([*savable.start(router.state.island, Room(1, 1), 0)]) == 1
    assert savable.slowdown == pytest.approx(4.0)


def test_filling_the_window_in_several_events_says_nothing_of_the_pace() -> None:
    """One event starts a part of them."""
    savable = at_a_quarter_of_the_pace()
    router = with_prompts(*((32, 1e6) for _ in range(60)))
    for number in range(4):
        router.state.clock.now = 1000.0 + 0.001 * number
        room = Room(32 * (50 - 13 * number), 60)
        assert len([*islice(savable.start(router.state.island, room, 0), 13)]) == min(13, 50 - 13 * number)
    assert savable.slowdown == pytest.approx(4.0)


def test_the_pace_is_measured_while_all_that_wait_are_lost_and_over_several_events() -> None:
    """A place becomes free every two seconds, in which a prompt that came meanwhile is lost."""
    savable, router = Savable(), with_prompts(*((32, 1.0) for _ in range(50)))
    for number in range(1, 9):
        router.state.clock.now = number * 2 * alone_s(64)
        each = rt(
            100 + number, router.state.clock.now + alone_s(64), arrived_s=router.state.clock.now - 0.001
        )
        each.request = request(100 + number, num_prompt=32)
        push(router, each)
        # One event starts one of the two.
        assert len([*islice(savable.start(router.state.island, Room(64, 2), 0), 1)]) == 1
        assert len([*savable.start(router.state.island, Room(32, 1), 0)]) == 1
    assert savable.slowdown == pytest.approx(2 * alone_s(64) / (2 * alone_s(32)))


def test_nothing_was_slow_while_nothing_waited() -> None:
    savable = at_a_quarter_of_the_pace()
    router = with_prompts()
    # Of two that come, one is started, and the other one's client leaves. An hour later there are two again.
    for first in (1, 3):
        router.state.clock.now = 4000.0 * first
        for key in (first, first + 1):
            each = rt(key, 1e6 + key, arrived_s=router.state.clock.now)
            each.request = request(key, num_prompt=32)
            push(router, each)
        assert [each.key for each in savable.start(router.state.island, Room(1, 1), 0)] == [first]
        router.state.prefill_queue.discard(router.state.requests[RequestKey(first + 1)])
    assert savable.slowdown == pytest.approx(4.0)


def test_no_more_is_started_than_what_instances_compute_beside_decodes() -> None:
    """However short iterations are for the sake of streams, each instance has a prompt."""
    iteration_s = alone_s(32)
    # Decodes take hardly any time, so that any objective could be kept.
    cost = replace(COST, decode_lines=[LinearCost(0.0, 1e-9)], decode_attention_s=0.0)

    def num_started(tbt_s: float) -> int:
        router = filled([])
        for name in ("colocated-0", "colocated-1"):
            router.state.cluster.add(replace(hello(name), cost=cost))
        for key in range(1, 30):
            each = state(key, Deadlines(True, 1e6 + key, tbt_s))
            each.request = request(key, num_prompt=8)
            push(router, each)
            router.policy.place(each, router.state.cluster.prefills, lambda view: 0, router.state.island)
        return len([*router.policy.start(router.state.island)])

    assert num_started(tbt_s=10 * iteration_s) == 2 * 2 * 32 // 8
    assert num_started(tbt_s=0.5 * iteration_s) == 2 * 32 // 8
    assert num_started(tbt_s=1e-6 * iteration_s) == 2
    cost = replace(cost, decode_lines=[LinearCost(0.25 * iteration_s, 0.0)])
    assert num_started(tbt_s=1e-6 * iteration_s) == 2 * 32 // 8, "no iteration is that short"


def test_prompts_wait_for_real_time_that_is_due_back_at_a_colocated_instance() -> None:
    """It was evicted, and they would take the blocks that it needs. Until it is due they start."""
    cost = replace(COST, decode_lines=[LinearCost(0.01, 0.0)])
    router = Router(RouterConfig(link="host"), Epoch(1), SchedulingConfig())
    router.state.cluster.add(replace(hello("colocated-0"), cost=cost))
    for key in range(1, 4):
        push(router, state(key, Deadlines(True, 1e6 + key, 1.0)))
    later, evicted = (state(key, Deadlines(True, due_s, 1.0)) for key, due_s in ((10, 500.0), (11, 100.0)))
    for each in (later, evicted):
        router.state.requests.add(each)
        router.state.decode_queue.add(each)
    (assign,) = router.policy.decide(router.state.island)
    assert isinstance(assign, Assign) and assign.requests == [evicted, later], "the soonest due first"

    def num_started(now: float) -> int:
        router.state.clock.now = now
        return sum(1 for _ in router.policy.start(router.state.island))

    assert num_started(101.0) == 0
    router.state.decode_queue.discard(evicted)
    assert num_started(101.0) > 0


def test_the_second_token_has_to_be_in_time_as_well() -> None:
    """It comes a second after the first, and is due a tenth of a second after it."""
    due_s = 2 * alone_s(32) + 0.01
    for later_s, expected in ((0.0, {1, 2}), (0.9, {1})):
        router = with_prompts((32, due_s + 0.9), (32, due_s))
        router.state.cluster.second_token_s = 0.1 + later_s
        assert {each.key for each in Savable()._in_time(router.state.island)} == expected


def test_first_tokens_that_come_later_than_expected_leave_time_for_fewer() -> None:
    savable, error_s = Savable(), 2 * alone_s(32)
    for number in range(100):
        router = with_prompts((32, 1e6))
        router.state.clock.now = 10.0 * number
        (request,) = savable.start(router.state.island, Room(ENDLESS, ENDLESS), 0)
        each = router.state.requests[request.key]
        each.output = [5]
        each.deadlines = with_first_token(each.deadlines, 10.0 * number + alone_s(32) + error_s)
    for spare, is_in_time in ((-0.5, False), (0.5, True)):
        due_s = 2000.0 + alone_s(32) + error_s + spare * alone_s(32)
        router = with_prompts((32, due_s), (10, 1e6))
        router.state.clock.now = 2000.0
        savable._learn_error()
        assert (RequestKey(1) in [each.key for each in savable._in_time(router.state.island)]) == is_in_time


def test_a_prompt_that_is_started_again_is_expected_from_then_on() -> None:
    """Its first start was refused."""
    savable, router = Savable(), with_prompts((32, 1e6))
    for now in (0.0, 50.0):
        router.state.clock.now = now
        (request,) = savable.start(router.state.island, Room(ENDLESS, ENDLESS), 0)
        each = router.state.requests[request.key]
        router.state.prefill_queue.push(each, router.policy.urgency(each, router.state.island))
    each.output = [5]
    each.deadlines = with_first_token(each.deadlines, 50.0 + alone_s(32))
    savable._learn_error()
    assert savable._error_s == pytest.approx(0.0, abs=0.01)
