"""Real time beside best effort on a decode instance, in virtual time, with costs that can be reckoned in the head."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from alignedserve.decode_worker.plan import DecodePlan
from alignedserve.decode_worker.schedule import DecodeSchedule
from alignedserve.decode_worker.scheduled_request import ScheduledRequest
from alignedserve.protocol.messages import InstanceLimits, Work
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policies.aligned.decode.eviction import by_worth
from alignedserve.scheduling.policies.aligned.decode.rt_demand import DEFAULT_TBT_S, HOLD, MAX_BARRED_S
from alignedserve.scheduling.policies.aligned.decode.slo_scheduler import SAFETY
from alignedserve.timing.cost import Channels, CopyChannel, CostModel, LinearCost
from alignedserve.timing.deadlines import Deadlines
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestKey
from tests.sim.islands import COST
from tests.works import make_work

BLOCK = 16
# an iteration takes 10 ms and 1 ms per request; a token of a chunk 1 ms; KV costs nothing
PLAIN = replace(
    COST,
    prefill_fixed_s=0.01,
    prefill_token_s=0.001,
    prefill_attention_s=0.0,
    decode_attention_s=0.0,
    decode_lines=[LinearCost(0.01, 0.001)],
)
LIMITS = InstanceLimits(
    num_blocks=200, block_size=BLOCK, max_num_seqs=40, max_num_batched_tokens=512, max_model_len=640
)


def schedule_of(
    limits: InstanceLimits = LIMITS, policy: str = "aligned", cost: CostModel = PLAIN, **scheduling: Any
) -> DecodeSchedule:
    told: dict[str, Any] = {"be_share": 0.0, "rt_headroom": 0.0, "be_pace": 0.8} | scheduling
    estimate = Estimate(cost)
    config = SchedulingConfig(policy, **({"evict_ahead": 1, "admit_ahead": 1} | told))
    return DecodeSchedule(limits, make_policy(config).decode(limits, estimate), estimate)


def rt(
    length: int = 20,
    tbt_s: float = 0.03,
    first_s: float = 0.0,
    num_cached: int | None = None,
    hurries: bool = False,
) -> Work:
    """Its first token came at `first_s`."""
    deadlines = Deadlines(is_rt=True, first_due_s=first_s, tbt_s=tbt_s, hurries=hurries)
    return make_work(length, num_cached=num_cached, deadlines=deadlines)


def be(
    length: int = 20, job_due_s: float | None = None, predicted_len: int = 0, is_pressed: bool = False
) -> Work:
    due_s = math.inf if job_due_s is None else job_due_s
    deadlines = Deadlines(job_due_s=due_s, is_pressed=is_pressed)
    return make_work(length, deadlines=deadlines, predicted_len=predicted_len)


def key(work: Work) -> RequestKey:
    return work.request.key


def admit(schedule: DecodeSchedule, *works: Work, now: float = 0.0) -> None:
    """They run from here on, if there is room."""
    schedule.offer(works, is_batch=False)
    for work in schedule.plan(now).pulls:
        assert schedule.blocks.pulled(key(work))


def iterate(schedule: DecodeSchedule, now: float = 0.0) -> DecodePlan:
    plan = schedule.plan(now)
    schedule.sampled(plan.run)
    schedule.took(PLAIN.iteration([], [1] * len(plan.run)))
    return plan


# ---- who runs -------------------------------------------------------------------------------------------------------


def test_without_real_time_everybody_runs() -> None:
    schedule = schedule_of()
    admit(schedule, *(be() for _ in range(30)))
    assert len(iterate(schedule).run) == 30


def test_best_effort_fills_what_real_time_allows_and_sits_out_beyond() -> None:
    schedule = schedule_of()
    admit(schedule, first := rt(tbt_s=0.031), *(be() for _ in range(30)))
    num_free = schedule.blocks.num_free
    # 27.9 ms: itself and 16 more
    plan = iterate(schedule, 0.0)
    assert len(plan.run) == 17 and plan.run[0] == key(first)
    assert not plan.wants_evicted and schedule.blocks.num_free == num_free, "nothing is moved"


def test_who_is_late_has_the_iteration_for_itself() -> None:
    schedule = schedule_of()
    admit(schedule, first := rt(tbt_s=0.03), be(), be(), now=0.025)
    assert iterate(schedule, 0.025).run == [key(first)]


def test_real_time_with_slack_sits_out_for_real_time_without() -> None:
    """In 30 ms there is time for 20."""
    schedule = schedule_of()
    admit(schedule, first := rt(tbt_s=0.03), *(rt(tbt_s=0.5) for _ in range(30)))
    num_free = schedule.blocks.num_free
    plan = iterate(schedule)
    assert len(plan.run) == 20 and plan.run[0] == key(first)
    assert not plan.wants_evicted and schedule.blocks.num_free == num_free, "nothing is moved"


def test_real_time_with_like_objectives_runs_together() -> None:
    schedule = schedule_of()
    admit(schedule, rt(tbt_s=0.03), *(rt(tbt_s=0.035) for _ in range(30)))
    assert len(iterate(schedule).run) == 31


def test_real_time_sits_out_no_longer_than_it_can() -> None:
    """Those that have waited longest are urgent in the end, and run in any case."""
    schedule = schedule_of()
    loose = [rt(tbt_s=0.2) for _ in range(30)]
    admit(schedule, rt(tbt_s=0.03), *loose)
    now, last = 0.0, dict.fromkeys(map(key, loose), 0.0)
    for _ in range(40):
        plan = iterate(schedule, now)
        now += 0.01 + 0.001 * len(plan.run)
        for each in plan.run:
            if each in last:
                assert now - last[each] <= 0.2
                last[each] = now
    assert all(now - since_s < 0.2 for since_s in last.values())


def test_who_has_lost_its_objective_does_not_keep_others_out() -> None:
    schedule = schedule_of()
    admit(schedule, rt(tbt_s=0.03), *(be() for _ in range(10)), now=5.0)
    assert len(iterate(schedule, 5.0).run) == 11


@pytest.mark.parametrize(("num_rt", "num_be"), [(20, 0), (31, 8)])
def test_best_effort_lengthens_iterations_a_little_where_real_time_alone_is_far_from_its_objectives(
    num_rt: int, num_be: int
) -> None:
    schedule = schedule_of(rt_stretch=0.2)
    # Alone they take 30 ms; or 41 ms, which is more than twice the objective.
    admit(schedule, *(rt(length=10, tbt_s=0.02) for _ in range(num_rt)), *(be(10) for _ in range(9)))
    assert len(iterate(schedule).run) == num_rt + num_be


def test_best_effort_has_all_the_time_that_an_objective_leaves() -> None:
    schedule = schedule_of(be_pace=0.5)
    admit(schedule, rt(tbt_s=1.0), *(be() for _ in range(39)))
    assert len(iterate(schedule, 0.0).run) == 40


def test_most_of_its_pace_is_enough_for_best_effort_beside_real_time_that_hurries() -> None:
    for be_pace in (0.5, 0.8):
        schedule = schedule_of(be_pace=be_pace, rt_stretch=100.0)
        admit(schedule, rt(tbt_s=1.0, hurries=True), *(be() for _ in range(39)))
        # 39 in 50 ms
        plan = iterate(schedule, 0.0)
        num_be = len(plan.run) - 1
        assert num_be / (11 + num_be) >= be_pace * 39 / 50 > (num_be - 1) / (10 + num_be)


def test_best_effort_hardly_lengthens_iterations_of_real_time_that_hurries() -> None:
    schedule = schedule_of(rt_stretch=0.5)
    admit(schedule, first := rt(tbt_s=1.0, hurries=True), *(be() for _ in range(20)))
    # 11 ms alone
    plan = iterate(schedule)
    assert len(plan.run) == 1 + 5 and plan.run[0] == key(first)


def test_beside_real_time_that_hurries_best_effort_has_what_it_is_owed() -> None:
    schedule = schedule_of(rt_stretch=0.0, be_share=0.1)
    admit(schedule, rt(tbt_s=1.0, hurries=True), *(be() for _ in range(20)))
    now, num_be = 0.0, 0
    for _ in range(100):
        num_run = len(iterate(schedule, now).run)
        num_be += num_run - 1
        now += 0.01 + 0.001 * num_run
    assert 0.08 * now <= 0.001 * num_be <= 0.1 * now


def test_best_effort_that_would_be_late_has_its_pace_beside_real_time_that_hurries() -> None:
    schedule = schedule_of(be_pace=0.8)
    admit(schedule, rt(tbt_s=1.0, hurries=True), be(is_pressed=True), *(be() for _ in range(38)))
    num_be = len(iterate(schedule).run) - 1
    assert num_be / (11 + num_be) >= 0.8 * 39 / 50 > (num_be - 1) / (10 + num_be)


def test_windows_count_for_more_than_short_iterations() -> None:
    schedule = schedule_of()
    pressed = [be(job_due_s=3.0, predicted_len=101) for _ in range(30)]
    admit(schedule, first := rt(tbt_s=1.0), *pressed)
    iterate(schedule, 0.0)
    # 30 ms for each of their tokens, and the last iteration took 28
    plan = iterate(schedule, 0.03)
    assert plan.run[0] == key(first) and len(plan.run) == 31


def test_slack_is_no_reason_to_be_slow() -> None:
    """However far ahead a stream is, it does not wait longer than its objective for a token."""
    schedule = schedule_of()
    admit(schedule, rt(tbt_s=0.031, first_s=9.0), *(be() for _ in range(30)))
    assert len(iterate(schedule, 0.0).run) == 17


def test_those_that_sat_out_come_next_and_then_those_that_are_done_soonest() -> None:
    schedule = schedule_of()
    works = [be(predicted_len=100 - number) for number in range(20)]
    admit(schedule, first := rt(tbt_s=0.022), *works)
    # 19.8 ms: itself and 8
    assert iterate(schedule, 0.0).run == [key(first), *(key(work) for work in works[:11:-1])]
    schedule = schedule_of()
    admit(schedule, first := rt(tbt_s=0.022), *works)
    seen = [set(iterate(schedule, 0.022 * turn).run[1:]) for turn in range(3)]
    assert not seen[0] & seen[1] and len(seen[0] | seen[1] | seen[2]) == 20


def test_whose_window_is_short_comes_first() -> None:
    schedule = schedule_of()
    others = [be() for _ in range(20)]
    pressed = be(job_due_s=1.0, predicted_len=101)
    admit(schedule, rt(tbt_s=0.022), *others, pressed)
    for turn in range(4):
        # 10 ms for each of its tokens: it has to be in every iteration
        assert key(pressed) in iterate(schedule, 0.022 * turn).run or turn == 0


def test_best_effort_falls_back_at_once_and_doubles_again() -> None:
    schedule = schedule_of()
    admit(schedule, rt(tbt_s=0.05), *(be() for _ in range(34)))

    def num_be(took_s: float, now: float) -> int:
        plan = schedule.plan(now)
        schedule.sampled(plan.run)
        schedule.took(took_s)
        return len(plan.run) - 1

    # 34 in 45 ms
    assert num_be(0.08, 0.0) == 34
    # a quarter, and twice as much after each iteration in time
    assert [num_be(0.02, 0.05 * turn) for turn in (1, 2)] == [8, 16]


def test_an_iteration_is_late_by_what_it_was_allowed_when_it_was_planned() -> None:
    """Not by what is known of overruns since: then the second late one would be in time."""
    schedule = schedule_of()
    admit(schedule, rt(tbt_s=0.05), *(be() for _ in range(34)))

    def num_be(turn: int, is_late: bool) -> int:
        plan = schedule.plan(0.05 * turn)
        schedule.sampled([])
        predicted_s = PLAIN.iteration([], [1] * len(plan.run)) * schedule.forecast.pace
        schedule.took(0.07 if is_late else predicted_s)
        return len(plan.run) - 1

    found = [num_be(turn, turn in (30, 40)) for turn in range(42)]
    assert found[40] > 8 and found[41] <= found[40] // 4


def test_what_is_measured_corrects_what_fits() -> None:
    schedule = schedule_of()
    admit(schedule, rt(tbt_s=0.06), *(be() for _ in range(34)))
    for turn in range(300):
        plan = schedule.plan(0.06 * turn)
        schedule.sampled([])
        schedule.took(2 * PLAIN.iteration([], [1] * len(plan.run)))
    assert schedule.forecast.pace == pytest.approx(2.0, rel=0.01)
    # 54 ms are 27 by the model
    assert len(schedule.plan(0.0).run) == 17


def test_where_iterations_take_longer_than_predicted_now_and_then_fewer_join() -> None:
    schedule = schedule_of()
    admit(schedule, rt(tbt_s=0.06), *(be() for _ in range(34)))
    for turn in range(200):
        plan = schedule.plan(0.06 * turn)
        schedule.sampled([])
        predicted_s = PLAIN.iteration([], [1] * len(plan.run)) * schedule.forecast.pace
        schedule.took(predicted_s * (3 if turn % 10 == 0 else 1))
    run = schedule.plan(0.0).run
    assert len(run) > 1 and 3 * PLAIN.iteration([], [1] * len(run)) * schedule.forecast.pace < 0.061


def test_kv_that_was_lost_is_computed_in_pieces_that_real_time_allows() -> None:
    schedule = schedule_of()
    admit(schedule, first := rt(tbt_s=0.05), lost := make_work(200, num_cached=0))
    plan = schedule.plan(0.0)
    # 45 ms, of which 11 are its own
    assert plan.run == [key(first)] and plan.chunks == [(key(lost), 32)]


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_other_policies_know_no_bounds(policy: str) -> None:
    schedule = schedule_of(policy=policy)
    admit(schedule, rt(tbt_s=0.03), *(be() for _ in range(30)))
    assert len(iterate(schedule, 0.0).run) == 31


# ---- real time that is about to come --------------------------------------------------------------------------------


def test_iterations_are_short_while_real_time_is_coming() -> None:
    schedule = schedule_of()
    admit(schedule, gone := rt(tbt_s=0.0405), *(be() for _ in range(39)))
    schedule.abort(key(gone))
    # 45.6 ms, and 26.6: it then runs for 11
    assert len(schedule.plan(0.0).run) == 35, "one may come"
    schedule.policy.expect(num_prefilling=1, num_ready=0, now=0.0)
    assert len(schedule.plan(0.0).run) == 16
    schedule.policy.expect(num_prefilling=0, num_ready=0, now=0.0)
    assert len(schedule.plan(61.0).run) == 39, (
        "as was its objective, nobody knows any more how tight it will be"
    )


def test_no_iteration_begins_just_before_real_time_joins() -> None:
    schedule = schedule_of()
    admit(schedule, gone := rt(tbt_s=0.04), be())
    schedule.abort(key(gone))
    schedule.policy.expect(num_prefilling=0, num_ready=1, now=1.0)
    plan = schedule.plan(1.0)
    assert not plan.goes_on and plan.hold_s == pytest.approx(HOLD * 0.04)
    schedule.offer([late := rt(tbt_s=0.04, first_s=1.0)], is_batch=False)
    schedule.policy.expect(num_prefilling=0, num_ready=0, now=1.002)
    plan = schedule.plan(1.002)
    assert plan.pulls == [late] and not plan.goes_on and plan.hold_s == pytest.approx(HOLD * 0.04)
    assert schedule.blocks.pulled(key(late))
    assert key(late) in schedule.plan(1.004).run


def test_real_time_without_an_objective_comes_as_if_it_had_the_usual_one() -> None:
    schedule = schedule_of()
    admit(schedule, gone := rt(tbt_s=math.inf), *(be() for _ in range(39)))
    schedule.abort(key(gone))
    assert len(schedule.plan(0.0).run) == 39
    schedule.policy.expect(num_prefilling=0, num_ready=1, now=1.0)
    assert schedule.plan(1.0).hold_s == pytest.approx(HOLD * DEFAULT_TBT_S)
    assert len(schedule.plan(1.03).run) == 18, "45 ms would be 35; 18 have 80 % of the pace that 39 have"


def test_what_does_not_come_holds_nobody_up_for_long() -> None:
    schedule = schedule_of()
    admit(schedule, gone := rt(tbt_s=0.04), be())
    schedule.abort(key(gone))
    schedule.policy.expect(num_prefilling=0, num_ready=1, now=1.0)
    hold_s = schedule.plan(1.0).hold_s
    assert schedule.plan(1.0 + hold_s).goes_on


def test_real_time_that_runs_is_not_made_late_by_real_time_that_comes() -> None:
    schedule = schedule_of()
    admit(schedule, first := rt(tbt_s=0.02, first_s=1.02), be(), now=1.0)
    schedule.policy.expect(num_prefilling=0, num_ready=1, now=1.025)
    # its next token is due in 15 ms, and takes 11
    assert schedule.plan(1.025).hold_s == pytest.approx(SAFETY * 0.004)
    assert schedule.plan(1.03).run == [key(first)]


def test_no_iteration_waits_for_real_time_that_has_time_for_two() -> None:
    """An iteration of 11 ms to wait for, and one of its own."""
    for tbt_s, is_held in ((0.02, True), (0.025, False)):
        schedule = schedule_of()
        admit(schedule, rt(tbt_s=tbt_s, first_s=1.04 - tbt_s), be(), now=1.0)
        schedule.policy.expect(num_prefilling=0, num_ready=1, now=1.025)
        assert bool(schedule.plan(1.025).hold_s) == is_held, tbt_s


def test_iterations_wait_for_real_time_that_asked_for_no_objective() -> None:
    """It has the operator's, which it would keep if it waited."""
    for hurries in (False, True):
        schedule = schedule_of()
        running = rt(tbt_s=0.1, first_s=0.94)
        running = replace(running, deadlines=replace(running.deadlines, hurries=hurries))
        admit(schedule, running, be(), now=1.0)
        schedule.policy.expect(num_prefilling=0, num_ready=1, now=1.0)
        assert bool(schedule.plan(1.0).hold_s) == hurries


def test_those_that_run_wait_no_longer_in_all_than_what_comes_would_wait() -> None:
    """One of 11 ms waits as long. Twenty wait 1.5 ms each."""
    for num_running, hold_s in ((1, 0.011), (20, 0.0015)):
        schedule = schedule_of()
        admit(schedule, *(rt(tbt_s=math.inf) for _ in range(num_running)), be(), now=1.0)
        schedule.policy.expect(num_prefilling=0, num_ready=1, now=1.0)
        assert schedule.plan(1.0).hold_s == pytest.approx(hold_s)


def test_no_iteration_waits_for_less_than_a_copy_takes() -> None:
    """Twenty would wait 1.5 ms each."""
    for latency_s, hold_s in ((0.001, 0.0015), (0.002, 0.0)):
        schedule = schedule_of(cost=replace(PLAIN, channels=Channels(*[CopyChannel(latency_s, 1e15)] * 4)))
        admit(schedule, *(rt(tbt_s=math.inf) for _ in range(20)), be(), now=1.0)
        schedule.policy.expect(num_prefilling=0, num_ready=1, now=1.0)
        assert schedule.plan(1.0).hold_s == pytest.approx(hold_s)


def test_copies_of_best_effort_wait_for_those_of_real_time_but_not_for_ever() -> None:
    schedule = schedule_of()
    admit(schedule, gone := rt(tbt_s=0.04), be())
    schedule.abort(key(gone))
    iterate(schedule, 0.9)
    schedule.policy.expect(num_prefilling=1, num_ready=0, now=1.0)
    schedule.offer([waiting := be()], is_batch=False)
    assert not schedule.plan(1.0).pulls and not schedule.plan(0.89 + MAX_BARRED_S).pulls
    assert schedule.plan(0.91 + MAX_BARRED_S).pulls == [waiting]


def test_an_instance_that_runs_nothing_does_not_wait_for_what_is_coming() -> None:
    schedule = schedule_of()
    schedule.policy.expect(num_prefilling=1, num_ready=0, now=1.0)
    schedule.offer([first := be()], is_batch=False)
    assert schedule.plan(1.0).pulls == [first]


# ---- room -----------------------------------------------------------------------------------------------------------


def test_real_time_is_admitted_before_best_effort() -> None:
    schedule = schedule_of(replace(LIMITS, max_num_seqs=2))
    schedule.offer([be(), first := rt(), second := rt()], is_batch=False)
    assert schedule.plan(0.0).pulls == [first, second]


def test_best_effort_leaves_headroom_and_real_time_takes_it() -> None:
    schedule = schedule_of(rt_headroom=0.1)
    schedule.offer([be() for _ in range(40)], is_batch=True)
    assert len(schedule.plan(0.0).pulls) == 36
    schedule.offer([late := rt()], is_batch=False)
    plan = schedule.plan(0.0)
    assert plan.pulls == [late] and not plan.wants_evicted


def test_the_last_of_best_effort_stays_in_headroom_for_which_nobody_waits() -> None:
    """It would be admitted again at once, since alone it may take all."""
    schedule = schedule_of(replace(LIMITS, num_blocks=20, max_model_len=320), rt_headroom=0.5)
    alone = be(15 * BLOCK)
    admit(schedule, alone)
    plan = schedule.plan(0.0)
    assert (plan.wants_evicted, plan.run) == ([], [key(alone)])
    schedule.offer([rt(10 * BLOCK)], is_batch=False)
    assert schedule.plan(0.0).wants_evicted == [key(alone)]


def test_headroom_that_real_time_took_is_made_again() -> None:
    schedule = schedule_of(rt_headroom=0.1)
    admit(schedule, *(be() for _ in range(40)))
    admit(schedule, *(rt() for _ in range(4)))
    assert len(schedule.plan(0.0).wants_evicted) == 1, "a slot for the next one"


def test_real_time_without_a_slot_evicts_best_effort() -> None:
    schedule = schedule_of()
    short, long, longest = (be(predicted_len=length) for length in (2, 200, 300))
    admit(schedule, long, short, longest, *(rt(tbt_s=1.0) for _ in range(37)))
    schedule.offer([first := rt(), rt()], is_batch=False)
    wanted = schedule.plan(0.0).wants_evicted
    assert wanted == [key(longest), key(long)], "they would stay for long"
    assert schedule.plan(0.0).wants_evicted == wanted, "who was named stays named"
    assert schedule.blocks.evict(wanted[0]) and schedule.blocks.evicted(wanted[0])
    assert schedule.plan(0.0).pulls == [first]


def test_blocks_that_are_about_to_be_free_are_not_freed_twice() -> None:
    """Twenty requests fill three blocks each, and need a fourth one next."""
    schedule = schedule_of(replace(LIMITS, num_blocks=62))
    admit(schedule, *(be(2 * BLOCK) for _ in range(20)))
    while not (wanted := iterate(schedule).wants_evicted):
        pass
    for each in wanted:
        assert schedule.blocks.evict(each)
    assert schedule.plan(0.0).wants_evicted == [], "their blocks come as soon as they are saved"


def test_who_leaves_for_blocks_leaves_a_slot_as_well() -> None:
    schedule = schedule_of(replace(LIMITS, num_blocks=62, max_num_seqs=20))
    admit(schedule, *(be(2 * BLOCK) for _ in range(20)))
    while not (wanted := iterate(schedule).wants_evicted):
        pass
    schedule.offer([rt()], is_batch=False)
    # they leave slots as well, and blocks enough for real time
    assert schedule.plan(0.0).wants_evicted == wanted


def scheduled_request(work: Work, num_blocks: int, batch: int = 0) -> ScheduledRequest:
    length = len(work.request.prompt) + 1
    request = ScheduledRequest(work, None, batch, length, length - 1, 600, work.deadlines.is_rt)
    request.num_blocks = num_blocks
    return request


def test_who_leaves_first_has_little_to_move_for_much_that_is_to_come() -> None:
    named, pressed = be(predicted_len=2), be(predicted_len=500)
    # 9 blocks to move beyond the one that the pool has, for 99 and for 9 tokens; 1 for 9
    far, near, little = be(predicted_len=100), be(predicted_len=10), be(predicted_len=10)
    real, older = rt(), rt(200)
    members = [
        scheduled_request(real, 2, batch=1),
        scheduled_request(older, 13, batch=0),
        scheduled_request(near, 10),
        scheduled_request(pressed, 2),
        scheduled_request(little, 2),
        scheduled_request(far, 10),
        scheduled_request(named, 30),
    ]
    at = SimpleNamespace(limits=LIMITS, was_evicted=lambda member: member.work is named)
    by = {id(member): member for member in members}
    in_order = by_worth(members, at, lambda member: by[id(member)].work is pressed)
    assert [by[id(member)].work for member in in_order] == [named, far, little, near, pressed, older, real]


def test_real_time_without_blocks_evicts_as_many_as_it_takes() -> None:
    limits = replace(LIMITS, num_blocks=60)
    schedule = schedule_of(limits)
    admit(schedule, *(be(159) for _ in range(6)))
    assert schedule.blocks.num_free == 0
    schedule.offer([late := rt(300)], is_batch=False)
    wanted = schedule.plan(0.0).wants_evicted
    assert len(wanted) == 2
    for each in wanted:
        assert schedule.blocks.evict(each) and schedule.blocks.evicted(each)
    assert schedule.plan(0.0).pulls == [late]


def test_nobody_leaves_where_that_is_of_no_use() -> None:
    schedule = schedule_of(replace(LIMITS, num_blocks=40))
    admit(schedule, rt(460), be(100))
    schedule.offer([rt(400)], is_batch=False)
    assert not schedule.plan(0.0).wants_evicted


def test_best_effort_that_has_had_nothing_for_long_comes_before_real_time_and_stays() -> None:
    schedule = schedule_of(replace(LIMITS, max_num_seqs=2), be_share=0.05)
    first, second, third = rt(tbt_s=0.04), rt(tbt_s=0.04), rt(tbt_s=0.04)
    admit(schedule, first, second)
    schedule.offer([waiting := be(), third], is_batch=False)
    assert not schedule.plan(0.0).pulls
    # half of 40 ms at a twentieth of the time
    assert not schedule.plan(0.39).pulls
    assert not schedule.plan(0.41).pulls, "there is no slot"
    schedule.blocks.ended(key(first))
    assert schedule.plan(0.42).pulls == [waiting]
    schedule.blocks.pulled(key(waiting))
    assert not schedule.plan(0.43).wants_evicted, "though real time waits"


# ---- credit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2])
def test_best_effort_gets_its_share_of_the_time_while_real_time_takes_all(share: float) -> None:
    schedule = schedule_of(be_share=share)
    # 25 ms, of 20 allowed
    admit(schedule, *(rt(tbt_s=0.02) for _ in range(15)), *(be() for _ in range(10)))
    now, best_effort_s, all_s = 0.0, 0.0, 0.0
    for turn in range(400):
        plan = schedule.plan(now)
        seconds = PLAIN.iteration([], [1] * len(plan.run))
        best_effort_s += 0.001 * (len(plan.run) - 15)
        all_s += seconds
        now += seconds
        schedule.took(seconds)
        # nothing gets longer, and nobody so late that it is lost
        if turn % 10 == 9:
            for member in schedule.blocks.running.values():
                member.deadlines = replace(member.deadlines, first_due_s=now)
    assert share - 0.01 <= best_effort_s / all_s <= share + 0.01


# ---- everything at once ---------------------------------------------------------------------------------------------


@dataclass
class World:
    """A router that evicts when asked and offers what it evicted again; copies take a turn."""

    schedule: DecodeSchedule
    now: float = 0.0
    works: dict[RequestKey, Work] = field(default_factory=dict)
    lengths: dict[RequestKey, int] = field(default_factory=dict)
    ends: dict[RequestKey, int] = field(default_factory=dict)
    computed: dict[RequestKey, int] = field(default_factory=dict)
    pulling: list[RequestKey] = field(default_factory=list)
    leaving: list[RequestKey] = field(default_factory=list)
    running: set[RequestKey] = field(default_factory=set)
    num_evicted: int = 0

    def add(self, work: Work, num_output: int) -> None:
        self.works[key(work)] = work
        self.lengths[key(work)] = len(work.request.prompt) + 1
        self.ends[key(work)] = len(work.request.prompt) + 1 + num_output
        self.computed[key(work)] = 0
        self.offer(key(work))

    def offer(self, each: RequestKey) -> None:
        known, length = self.works[each], self.lengths[each]
        output = [0] * (length - len(known.request.prompt))
        work = replace(known, output=output, num_cached=length - 1)
        self.schedule.offer([work], is_batch=False)

    def end_copies(self) -> None:
        for each in self.pulling:
            assert self.schedule.blocks.pulled(each)
            self.running.add(each)
        for each in self.leaving:
            assert self.schedule.blocks.evicted(each)
            self.offer(each)
        self.pulling, self.leaving = [], []

    def turn(self) -> DecodePlan:
        plan = self.schedule.plan(self.now)
        self.schedule.check()
        self.pulling = [key(work) for work in plan.pulls]
        seconds = PLAIN.iteration([], [1] * len(plan.run)) if plan.run else plan.hold_s or 0.001
        self.check(plan, seconds)
        self.now += seconds
        if plan.run:
            self.schedule.took(seconds)
        self.schedule.sampled(plan.run)
        for each in plan.run:
            self.lengths[each] += 1
            self.computed[each] += 1
            if self.lengths[each] == self.ends[each]:
                self.schedule.blocks.ended(each)
                self.running.remove(each)
                del self.works[each]
        for each in plan.wants_evicted:
            if each in self.running and self.schedule.blocks.evict(each):
                self.running.remove(each)
                self.leaving.append(each)
                self.num_evicted += 1
        return plan

    def check(self, plan: DecodePlan, seconds: float) -> None:
        """Best effort never makes real time late that could have been in time."""
        rt_run = [each for each in plan.run if self.works[each].deadlines.is_rt]
        if not rt_run or len(rt_run) == len(plan.run):
            return
        allowances = []
        for each in rt_run:
            work = self.works[each]
            number = self.lengths[each] - len(work.request.prompt)
            if not work.deadlines.is_lost(number, self.now):
                allowances.append(work.deadlines.allowance_s(number, self.now))
        assert not allowances or seconds <= min(allowances) + 1e-9


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(41, 120),
    max_num_seqs=st.integers(1, 12),
    rt_headroom=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_real_time_waits_for_its_own_and_everybody_ends(
    seed: int, num_blocks: int, max_num_seqs: int, rt_headroom: float
) -> None:
    rng = random.Random(seed)
    limits = replace(LIMITS, num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    world = World(schedule_of(limits, rt_headroom=rt_headroom))
    left = {"rt": rng.randint(1, 15), "be": rng.randint(1, 15)}
    num_all, num_done = sum(left.values()), 0
    needed: dict[RequestKey, int] = {}
    for _ in range(20_000):
        for kind in [kind for kind, num in left.items() if num and rng.random() < 0.2]:
            left[kind] -= 1
            length, num_output = rng.randint(1, 300), rng.randint(1, 60)
            if kind == "rt":
                work = rt(length, rng.choice([0.02, 0.05]), world.now)
            else:
                work = be(length, rng.choice([None, world.now + 1.0]), rng.choice([0, num_output]))
            needed[key(work)] = num_output
            world.add(work, num_output)
        if rng.random() < 0.3:
            world.schedule.policy.expect(rng.randint(0, 1), rng.randint(0, 1), world.now)
        world.turn()
        if rng.random() < 0.5 or world.pulling or world.leaving:
            world.end_copies()
        num_done = num_all - sum(left.values()) - len(world.works)
        if num_done == num_all:
            break
    assert num_done == num_all
    assert world.computed == needed, "computed once"
    world.schedule.check_idle()


def test_both_classes_together_have_the_tokens_of_one_iteration() -> None:
    """Some of both have lost KV, and others decode beside them."""
    schedule = schedule_of(replace(LIMITS, num_blocks=400, max_num_batched_tokens=64), rt_headroom=0.0)
    admit(schedule, *(be(100) for _ in range(8)), rt(80, tbt_s=9.0, num_cached=10))
    schedule.offer([make_work(90, num_cached=3)], is_batch=False)
    for work in schedule.plan(0.0).pulls:
        assert schedule.blocks.pulled(key(work))
    plan = schedule.plan(1.0)
    pending = {member.key: member.num_pending for member in schedule.blocks.running.values()}
    num_tokens = sum(count for _, count in plan.chunks) + sum(pending[each] for each in plan.run)
    assert num_tokens == 64


def test_one_request_of_real_time_that_waits_for_a_slot_gets_one() -> None:
    schedule = schedule_of(replace(LIMITS, max_num_seqs=4))
    admit(schedule, *(be() for _ in range(4)))
    schedule.offer([rt()], is_batch=False)
    assert len(schedule.plan(0.0).wants_evicted) == 1


def test_real_time_is_never_left_waiting_beside_best_effort_that_could_leave() -> None:
    """Whatever number of blocks it is short of, one too."""
    ended = set()
    for num_blocks in range(12, 40):
        schedule = schedule_of(replace(LIMITS, num_blocks=num_blocks, max_model_len=190))
        admit(schedule, *(be(2 * BLOCK) for _ in range(4)))
        schedule.offer([rt(6 * BLOCK)], is_batch=False)
        plan = schedule.plan(0.0)
        assert bool(plan.pulls) != bool(plan.wants_evicted), f"of {num_blocks} blocks"
        ended.add(bool(plan.pulls))
    assert ended == {True, False}


@pytest.mark.parametrize("num_be", [1, 4])
def test_nor_where_admission_leaves_a_watermark_free(num_be: int) -> None:
    ended = set()
    limits = replace(LIMITS, max_model_len=400 * BLOCK)
    for num_blocks in range(400, 450):
        schedule = schedule_of(replace(limits, num_blocks=num_blocks), evict_ahead=4, admit_ahead=None)
        admit(schedule, *(be(360 // num_be * BLOCK) for _ in range(num_be)))
        schedule.offer([rt(60 * BLOCK)], is_batch=False)
        plan = schedule.plan(0.0)
        assert bool(plan.pulls) != bool(plan.wants_evicted), f"of {num_blocks} blocks"
        ended.add(bool(plan.pulls))
    assert ended == {True, False}


@pytest.mark.parametrize("length", [90 * BLOCK, 91 * BLOCK - 1, 95 * BLOCK])
def test_what_needs_all_blocks_has_all_others_leave(length: int) -> None:
    """Those too which grow into their next block, or have to leave for want of one."""
    limits = replace(LIMITS, num_blocks=400, max_model_len=400 * BLOCK)
    schedule = schedule_of(limits, evict_ahead=4, admit_ahead=None)
    admit(schedule, *(be(length) for _ in range(4)))
    schedule.offer([rt(398 * BLOCK)], is_batch=False)
    assert len(schedule.plan(0.0).wants_evicted) == 4
