"""Real time beside best effort on a prefill instance, in virtual time, with costs that can be reckoned in the head."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from alignedserve.prefill_worker.boundary import PrefillPlan
from alignedserve.prefill_worker.schedule import PrefillSchedule
from alignedserve.prefill_worker.scheduled_request import PromptState
from alignedserve.protocol.messages import InstanceLimits, Work
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policies.aligned.prefill.part import AlignedPrefill
from alignedserve.scheduling.policies.aligned.prefill.slo_scheduler import FLOOR, MAX_STRETCH, SPARE
from alignedserve.scheduling.policies.aligned.rt_beside_be import ENOUGH
from alignedserve.timing.cost import CostModel
from alignedserve.timing.deadlines import Deadlines
from alignedserve.timing.estimate import Estimate, num_enough
from alignedserve.types import RequestKey
from tests.sim.islands import COST
from tests.works import make_work

BLOCK = 16
# an iteration takes 10 ms and 1 ms per token; attention takes nothing
PLAIN = replace(
    COST,
    prefill_fixed_s=0.01,
    prefill_token_s=0.001,
    prefill_attention_s=0.0,
    decode_attention_s=0.0,
    decode_lines=[replace(COST.decode_lines[0], fixed_s=0.02, token_s=0.0)],
)
LIMITS = InstanceLimits(
    num_blocks=100, block_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=512, max_model_len=1600
)


def schedule_of(
    cost: CostModel = PLAIN, limits: InstanceLimits = LIMITS, policy: str = "aligned", **scheduling: float
) -> PrefillSchedule:
    config = SchedulingConfig(policy, **{"chunk_share": 0.2} | scheduling)  # type: ignore[arg-type]
    return PrefillSchedule(limits, 0.0, make_policy(config), Estimate(cost))


def rt(
    length: int, due_s: float = 1.0, ttft_s: float = 1.0, num_cached: int = 0, output_len: int = 0
) -> Work:
    deadlines = Deadlines(is_rt=True, first_due_s=due_s, tbt_s=0.1)
    return make_work(length, output_len, num_cached, ttft_s=ttft_s, deadlines=deadlines)


def be(length: int, job_due_s: float | None = None, predicted_len: int = 0, num_cached: int = 0) -> Work:
    deadlines = Deadlines() if job_due_s is None else Deadlines(job_due_s=job_due_s)
    return make_work(length, 0, num_cached, deadlines=deadlines, predicted_len=predicted_len)


def owned(owner: str, work: Work) -> Work:
    return replace(work, request=replace(work.request, owner=owner))


def key(work: Work) -> RequestKey:
    return work.request.key


def compute(schedule: PrefillSchedule, now: float = 0.0) -> list[tuple[RequestKey, int]]:
    """Copies take no time."""
    chunks = schedule.plan(now).chunks
    for each, count in chunks:
        schedule.prompts.computed(each, count)
        if schedule.prompts.started[each].state is PromptState.SAVING:
            schedule.prompts.saved(each)
    return chunks


def order(schedule: PrefillSchedule, works: list[Work], now: float) -> list[int]:
    """One at a time, so that chunks tell who goes before whom: numbers of the works."""
    schedule.prefill(works)
    numbers = {key(work): number for number, work in enumerate(works)}
    begun: dict[int, None] = {}
    for _ in range(100):
        begun |= {numbers[each]: None for each, _ in compute(schedule, now)}
    return list(begun)


ONE = replace(LIMITS, max_num_batched_tokens=BLOCK, max_num_seqs=16)


# ---- order ----------------------------------------------------------------------------------------------------------


def test_real_time_goes_by_slack() -> None:
    # 26, 58 and 26 ms of work: they have to begin at 474, 442 and 374 ms
    works = [rt(16, due_s=0.5), rt(48, due_s=0.5), rt(16, due_s=0.4)]
    assert order(schedule_of(limits=ONE), works, 0.0) == [2, 1, 0]


def test_who_can_not_make_it_any_more_is_overtaken_and_yet_goes_before_later_ones() -> None:
    lost, can_make_it, much_later = rt(16, due_s=0.5), rt(16, due_s=9.0), rt(16, due_s=10.6)
    assert order(schedule_of(limits=ONE), [lost, can_make_it, much_later], now=0.475) == [1, 0, 2]
    assert order(schedule_of(limits=ONE), [lost, can_make_it, much_later], now=0.473) == [0, 1, 2]


def test_a_stream_that_was_broken_off_is_due_when_its_next_token_is() -> None:
    # the third token of a stream whose first was due at 0: 0.2 s
    broken_off = rt(13, due_s=0.0, output_len=2)
    assert order(schedule_of(limits=ONE), [rt(16, due_s=0.3), broken_off], now=0.0) == [1, 0]


def test_best_effort_goes_after_real_time_by_the_latest_start() -> None:
    # to begin at 10 - (0.026 + 2), 9 - 0.026, and whoever has no window at 0 + 0.026 or 0.042
    works = [
        be(16, job_due_s=10.0, predicted_len=100),
        be(16, job_due_s=9.0),
        be(32),
        be(16),
        rt(16, due_s=99.0),
    ]
    assert order(schedule_of(limits=ONE), works, 0.0) == [4, 3, 2, 0, 1]


@pytest.mark.parametrize("policy", ["fcfs", "aligned", "priority"])
def test_prompts_of_several_owners_start_in_turn(policy: str) -> None:
    """Those that are being computed count."""
    schedule = schedule_of(limits=replace(LIMITS, max_num_seqs=8), policy=policy)
    many = [owned("a", rt(200)) for _ in range(12)]
    schedule.prefill(many)
    assert [key(work) for work in schedule.plan(0.0).new_prompts] == [*map(key, many[:7])], "8 don't fit"
    schedule.prefill(few := [owned("b", rt(10)) for _ in range(2)])
    assert [key(work) for work in schedule.plan(0.0).new_prompts] == [key(few[0])], "a slot is free"
    for work in many[:2]:
        schedule.prompts.computed(key(work), 200)
        schedule.prompts.saved(key(work))
    assert [key(work) for work in schedule.plan(0.0).new_prompts] == [key(few[1]), key(many[7])]


@pytest.mark.parametrize("policy", ["fcfs", "aligned", "accelgen"])
def test_prompts_of_several_owners_are_computed_in_turn(policy: str) -> None:
    works = [*(owned("a", rt(32)) for _ in range(4)), *(owned("b", rt(32)) for _ in range(2))]
    assert order(schedule_of(limits=ONE, policy=policy), works, 0.0) == [0, 4, 1, 5, 2, 3]


@pytest.mark.parametrize("policy", ["fcfs", "aligned", "accelgen"])
def test_iterations_are_short_while_another_owner_is_expected(policy: str) -> None:
    """48 tokens are the fewest blocks with four fifths of the pace."""
    schedule = schedule_of(policy=policy)

    def counts(now: float) -> list[int]:
        return [count for _, count in compute(schedule, now)]

    schedule.prefill([owned("a", rt(400))])
    assert counts(0.0) == [400]
    schedule.prefill([owned("a", rt(400)), owned("b", rt(10))])
    assert sum(counts(1.0)) <= 48
    # The one in pieces does not hold up the other owner's.
    assert len(schedule.prompts) == 1 or (counts(1.1)[0] == 10 and len(schedule.prompts) == 1)
    assert counts(1.2) == [48] and counts(10.9) == [48]
    assert counts(11.2)[0] > 250, "the other one is not expected any more"


@pytest.mark.parametrize("policy", ["fcfs", "aligned", "accelgen"])
def test_a_prompt_in_pieces_takes_turns_with_those_of_another_owner(policy: str) -> None:
    """The other one's prompts go before its next piece, though they don't fit whole either."""
    schedule = schedule_of(limits=replace(LIMITS, num_blocks=400, max_model_len=4096), policy=policy)
    schedule.prefill([long := owned("a", rt(1500))])
    assert compute(schedule) == [(key(long), 512)]
    for number in range(5):
        schedule.prefill([work := owned("b", rt(40, due_s=99.0))])
        for _ in range(3):
            compute(schedule, 1.0 + number)
        assert [*schedule.prompts.started] == [key(long)], (
            f"40 tokens of {key(work)} are computed in three iterations"
        )
    assert schedule.prompts.started[key(long)].num_computed >= 512 + 5 * 16


@pytest.mark.parametrize("length", [16, 240, 256, 512])
@pytest.mark.parametrize("policy", ["fcfs", "aligned", "accelgen", "priority"])
def test_a_long_prompt_has_about_half_beside_a_flood_of_short_ones(policy: str, length: int) -> None:
    """It has more than half with very short ones, because each of its turns is a whole iteration."""
    limits = replace(LIMITS, num_blocks=2000, max_model_len=8192, max_num_seqs=64)
    schedule, numbers = schedule_of(limits=limits, policy=policy), itertools.count()
    schedule.prefill([long := owned("a", rt(8000, due_s=50.0))])
    num_of_each = Counter[str]()
    for number in range(40):
        missing = schedule.prompts.num_missing
        for _ in range((2048 - missing["b"]) // length):
            schedule.prefill([owned("b", rt(length, due_s=50.0 + next(numbers)))])
        for each, num_tokens in compute(schedule, 0.1 * number):
            num_of_each["a" if each == key(long) else "b"] += num_tokens
    assert 0.4 < num_of_each["a"] / num_of_each.total() < 0.7


def test_of_each_owner_one_prompt_is_in_pieces() -> None:
    """Others of it are more urgent meanwhile, because more of them is missing."""
    schedule = schedule_of(limits=replace(LIMITS, num_blocks=2000, max_model_len=4096, max_num_seqs=8))
    owner_of = {}
    for owner in "ababab":
        schedule.prefill([each := owned(owner, rt(1000, due_s=50.0))])
        owner_of[key(each)] = owner
    while schedule.prompts:
        compute(schedule, 0.0)
        prompts = schedule.prompts.started.values()
        in_pieces = [owner_of[each.key] for each in prompts if 0 < each.num_computed < each.num_tokens]
        assert len({*in_pieces}) == len(in_pieces)


@pytest.mark.parametrize("policy", ["aligned", "priority"])
def test_an_owner_with_less_does_not_pass_real_time_with_best_effort(policy: str) -> None:
    works = [
        *(owned("a", rt(16)) for _ in range(3)),
        owned("a", be(16)),
        *(owned("b", be(16)) for _ in range(2)),
        owned("b", rt(16)),
    ]
    limits = replace(ONE, max_num_seqs=2)
    assert order(schedule_of(limits=limits, policy=policy, rt_headroom=0.0), works, 0.0)[:4] == [0, 6, 1, 2]


def test_who_came_first_goes_first_whatever_the_length_in_the_long_run() -> None:
    schedule = schedule_of(limits=ONE, rt_headroom=0.0)
    schedule.prefill([long := be(160)])
    compute(schedule, 0.0)
    schedule.prefill([be(16)])
    assert compute(schedule, 0.2)[0][0] == key(long)


@pytest.mark.parametrize("policy, expected", [("priority", [2, 0, 1]), ("fcfs", [0, 1, 2])])
def test_without_deadlines_there_are_classes_at_most(policy: str, expected: list[int]) -> None:
    works = [be(16), be(16, job_due_s=0.1), rt(16)]
    assert order(schedule_of(limits=ONE, policy=policy), works, 0.0) == expected


# ---- chunks ---------------------------------------------------------------------------------------------------------


def test_a_chunk_takes_a_share_of_the_tightest_objective_of_late() -> None:
    schedule = schedule_of(chunk_share=0.2, be_share=0.0)
    schedule.prefill([long := be(1500)])
    # of 1 s while no objective was seen: 190 tokens, whole blocks
    assert compute(schedule) == [(key(long), 176)]
    schedule.prefill([rt(1, ttft_s=0.5), rt(1, ttft_s=0.8)])
    # 12 ms for both, and BE adds a twentieth at most: nothing
    assert [count for _, count in compute(schedule, 1.0)] == [1, 1]
    assert compute(schedule, 60.9) == [(key(long), 80)], "of 0.5 s"
    assert compute(schedule, 61.1) == [(key(long), 176)], "of 1 s"


def test_an_objective_counts_as_long_as_its_prompt_is_computed_and_not_while_it_is_saved() -> None:
    schedule = schedule_of(chunk_share=0.2, be_share=0.0)
    schedule.prefill([hurried := rt(1, ttft_s=0.5)])
    assert schedule.plan(0.0).chunks == [(key(hurried), 1)]
    schedule.prompts.computed(key(hurried), 1)
    schedule.plan(30.0)
    schedule.prefill([long := be(1500)])
    schedule.plan(60.9)
    schedule.prompts.saved(key(hurried))
    assert compute(schedule, 61.1) == [(key(long), 176)], "of 1 s, and not of 0.5 s"


def test_best_effort_earns_nothing_while_all_of_it_is_computed() -> None:
    schedule = schedule_of(be_share=0.5)
    schedule.prefill([first := be(16)])
    schedule.prompts.computed(*schedule.plan(0.0).chunks[0])
    part = schedule.policy
    assert isinstance(part, AlignedPrefill)
    schedule.plan(5.0)
    assert part._slo._credit.seconds == 0.0, "it is saved, and waits for no computing"
    schedule.prompts.saved(key(first))


def test_later_chunks_are_shorter() -> None:
    # 16 ms per token at the end of 1600: attention is a pair's 5 us
    schedule = schedule_of(replace(PLAIN, prefill_attention_s=5e-6))
    schedule.prefill([be(1000)])
    counts = []
    while chunks := compute(schedule):
        counts += [count for _, count in chunks]
    assert counts == sorted(counts[:-1], reverse=True) + counts[-1:] and sum(counts) == 1000
    assert len(set(counts)) > 3 and all(count % BLOCK == 0 for count in counts[:-1])


def test_a_bound_that_can_not_be_held_does_not_make_chunks_of_nothing() -> None:
    # one block takes 116 ms, of 20 allowed: then up to a quarter more, 145 ms
    schedule = schedule_of(replace(PLAIN, prefill_fixed_s=0.1), chunk_share=0.02)
    schedule.prefill([be(1000)])
    assert [count for _, count in compute(schedule)] == [32]
    schedule = schedule_of(replace(PLAIN, prefill_token_s=0.1), chunk_share=0.02)
    schedule.prefill([be(1000)])
    assert [count for _, count in compute(schedule)] == [16]


def test_real_time_is_cut_by_what_others_of_it_could_wait_at_most() -> None:
    schedule = schedule_of(be_share=0.0)
    schedule.prefill([first := rt(400)])
    assert compute(schedule) == [(key(first), 400)]
    schedule.prefill([second := rt(400, ttft_s=0.3)])
    # 300 ms: 290 tokens, whole blocks
    assert compute(schedule) == [(key(second), 288)]


def test_one_of_a_class_is_in_pieces_and_short_ones_go_whole_between() -> None:
    schedule = schedule_of(be_share=0.0)
    first, second = rt(400, due_s=50.0, ttft_s=0.2), rt(400, due_s=40.0)
    schedule.prefill([first])
    assert compute(schedule) == [(key(first), 176)]
    schedule.prefill([second, short := rt(30, due_s=30.0)])
    # the second would be first by its slack, but it is long
    assert compute(schedule) == [(key(short), 30), (key(first), 160)]
    assert compute(schedule) == [(key(first), 64), (key(second), 112)]
    assert compute(schedule) == [(key(second), 176)]


def test_best_effort_fills_what_hardly_makes_it_longer_for_real_time() -> None:
    schedule = schedule_of(be_share=0.0)
    schedule.prefill([long := be(500), first := rt(350)])
    # 360 ms, and a twentieth more: 16 tokens
    assert compute(schedule) == [(key(first), 350), (key(long), 16)]
    # a fifth of the second that the objective allows is 200 ms
    assert compute(schedule) == [(key(long), 176)]


def test_best_effort_fills_the_time_that_the_objective_leaves() -> None:
    """An iteration with both takes no longer than one of best effort alone, and than a quarter of the time left without
    the time in the router's queue."""
    for due_s, num_tokens in ((1.0, 128), (0.95, 112), (0.9, 64), (0.8, 0)):
        schedule = schedule_of(be_share=0.0)
        schedule.prefill([long := be(500), first := rt(50, due_s)])
        beside = [(key(long), num_tokens)] if num_tokens else []
        assert compute(schedule) == [(key(first), 50), *beside], due_s


def test_best_effort_slows_all_real_time_that_waits_by_as_much() -> None:
    """The budget holds 100 tokens of 200. Both prompts take 220 ms alone, and 250 ms are left to them."""
    limits = replace(LIMITS, max_num_batched_tokens=256)
    schedule = schedule_of(limits=limits, be_share=0.0)
    schedule.prefill([be(500), rt(100), rt(100)])
    chunks = compute(schedule)
    assert sum(count for _, count in chunks) <= 240


def test_beside_real_time_without_an_objective_chunks_are_as_short_as_the_pace_allows() -> None:
    schedule = schedule_of(be_share=0.0)
    unstated = make_work(16, 0, 0, deadlines=Deadlines(is_rt=True))
    schedule.prefill([long := be(500), unstated])
    assert compute(schedule) == [(key(unstated), 16)]
    # of the pace of 512 in 522 ms, 144 have nineteen twentieths
    assert compute(schedule) == [(key(long), 144)]
    # a minute later nothing is left of that
    assert compute(schedule, 61.0) == [(key(long), 176)]


def test_where_attention_makes_long_chunks_slow_the_fastest_counts() -> None:
    # 96 have the best pace, 0.83 in 1 ms; 512 take 784 ms
    cost = replace(PLAIN, prefill_attention_s=1e-6)
    schedule = schedule_of(cost, be_share=0.0)
    schedule.prefill([long := be(500), make_work(16, 0, 0, deadlines=Deadlines(is_rt=True))])
    compute(schedule)
    assert compute(schedule) == [(key(long), 48)]


def test_chunks_are_not_so_short_that_they_keep_the_instance_busy_for_longer() -> None:
    # 40 ms are allowed for the sake of 0.2 s; but 96 have less than six tenths of the pace of 512 in 612 ms
    schedule = schedule_of(replace(PLAIN, prefill_fixed_s=0.1), be_share=0.0)
    schedule.prefill([long := be(500), rt(16, ttft_s=0.2)])
    compute(schedule)
    assert compute(schedule) == [(key(long), 112)]


def test_best_effort_waits_for_a_copy_of_real_time() -> None:
    schedule = schedule_of(be_share=0.0)
    schedule.prefill([long := be(500), first := rt(150)])
    for each, count in schedule.plan(0.0).chunks:
        schedule.prompts.computed(each, count)
    assert not schedule.plan(0.95).goes_on, "its KV is on its way to the pool, and 50 ms are left"
    schedule.prompts.saved(key(first))
    assert schedule.plan(0.95).chunks == [(key(long), 176)]


def test_best_effort_is_computed_during_a_copy_that_real_time_has_time_for() -> None:
    schedule = schedule_of(be_share=0.0)
    schedule.prefill([long := be(500), rt(150)])
    for each, count in schedule.plan(0.0).chunks:
        schedule.prompts.computed(each, count)
    # a quarter of 400 ms
    assert schedule.plan(0.6).chunks == [(key(long), 80)]


def test_what_is_measured_corrects_the_bound() -> None:
    schedule = schedule_of(be_share=0.0)
    schedule.prefill([be(1500)])
    for _ in range(200):
        (chunk,) = schedule.plan(0.0).chunks
        schedule.forecast.took(4 * PLAIN.iteration([(0, chunk[1])], []))
    assert schedule.forecast.pace == pytest.approx(4.0, rel=0.01)
    # 50 ms by the model
    assert [count for _, count in schedule.plan(0.0).chunks] == [32]


# ---- credit ---------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """An instance in virtual time: copies take no time, iterations what was foretold."""

    schedule: PrefillSchedule
    now: float = 0.0
    # of each class, by whether it is RT
    seconds: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    works: dict[RequestKey, Work] = field(default_factory=dict)
    done: dict[RequestKey, float] = field(default_factory=dict)
    tokens: dict[RequestKey, int] = field(default_factory=dict)
    num_given_up: int = 0

    def add(self, *works: Work) -> None:
        self.schedule.prefill(works)
        self.works |= {key(work): work for work in works}

    @property
    def waiting(self) -> dict[bool, bool]:
        """Of each class, whether any of it is not done."""
        left = [work.deadlines.is_rt for each, work in self.works.items() if each not in self.done]
        return {is_rt: is_rt in left for is_rt in (True, False)}

    @property
    def tightest_s(self) -> float:
        seen = [work.request.ttft_s for work in self.works.values() if work.deadlines.is_rt]
        return min(1.0 if each is None else each for each in seen) if seen else 1.0

    def step(self) -> PrefillPlan:
        plan = self.schedule.plan(self.now)
        self.schedule.check()
        self.num_given_up += len(plan.preempted)
        for each in plan.preempted:
            self.schedule.prompts.preempted(each)
        for work in plan.loads:
            self.schedule.prompts.loaded(key(work))
        before = {each: self.schedule.prompts.started[each].num_computed for each, _ in plan.chunks}
        self.now += PLAIN.iteration([(before[each], count) for each, count in plan.chunks], [])
        for each, count in plan.chunks:
            self.tokens[each] = self.tokens.get(each, 0) + count
            self.seconds[self.works[each].deadlines.is_rt] += count * PLAIN.prefill_token_s
            self.schedule.prompts.computed(each, count)
            if before[each] + count == len(self.works[each].request.prompt):
                self.schedule.prompts.saved(each)
                self.done[each] = self.now
        return plan


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2])
def test_best_effort_gets_its_share_of_the_time_while_real_time_takes_all(share: float) -> None:
    run = Run(schedule_of(be_share=share))
    run.add(be(1500), be(1500), be(1500))
    while run.now < 20.0:
        if len(run.works) - len(run.done) < 6:
            run.add(rt(150, due_s=run.now + 1.0))
        run.step()
    part = run.seconds[False] / (run.seconds[True] + run.seconds[False])
    # an iteration's fixed part is nobody's; and some fits beside
    assert share * 0.8 <= part <= share + 0.12


# ---- room -----------------------------------------------------------------------------------------------------------


def test_best_effort_leaves_a_slot_and_blocks_free() -> None:
    schedule = schedule_of(rt_headroom=0.1)
    schedule.prefill([be(480), be(480), be(240), be(240)])
    assert len(schedule.plan(0.0).new_prompts) == 3, "one slot of 4 is left"
    assert schedule.memory.num_free == 100 - 15 - 15 - 30
    schedule = schedule_of(rt_headroom=0.1)
    schedule.prefill([be(480), be(480), be(496)])
    assert len(schedule.plan(0.0).new_prompts) == 2, "10 would not be left of 100"
    schedule = schedule_of(rt_headroom=0.1)
    schedule.prefill([long := rt(320)])
    assert compute(schedule) == [(key(long), 320)]
    schedule.prefill([be(480), be(480), be(480)])
    assert len(schedule.plan(0.1).new_prompts) == 2, "as much as the longest of real time of late needs"


def test_who_has_least_to_load_again_gives_way_and_computes_nothing_twice() -> None:
    limits = replace(LIMITS, max_num_seqs=8)
    run = Run(schedule_of(limits=limits, rt_headroom=0.0, be_share=0.0))
    run.add(first := be(800))
    run.step()
    run.add(second := be(640))
    run.step()
    assert run.tokens == {key(first): 352}, "the second has blocks, and has to wait"
    run.add(urgent := rt(320, due_s=run.now + 0.1, ttft_s=0.2))
    plan = run.step()
    assert plan.preempted == [key(second)] and plan.chunks == [] and plan.goes_on
    assert run.step().new_prompts == [urgent]
    run.add(longer := rt(1280, due_s=run.now + 1))
    plan = run.step()
    assert plan.preempted == [key(first)] and [each for each, _ in plan.chunks] == [key(urgent)]
    while len(run.done) < 4:
        run.step()
    assert run.tokens == {key(work): len(work.request.prompt) for work in (first, second, urgent, longer)}
    assert run.done[key(longer)] < run.done[key(first)]
    run.schedule.check_idle()


def test_nobody_gives_way_where_that_is_of_no_use() -> None:
    schedule = schedule_of(rt_headroom=0.0, be_share=0.0)
    schedule.prefill([rt(1200), be(320)])
    schedule.plan(0.0)
    schedule.prefill([rt(1000)])
    assert schedule.plan(0.0).preempted == []


def test_giving_up_can_be_interrupted() -> None:
    schedule = schedule_of(rt_headroom=0.0, be_share=0.0)
    schedule.prefill([victim := be(1590)])
    compute(schedule)
    schedule.prefill([urgent := rt(320)])
    assert schedule.plan(0.0).preempted == [key(victim)]
    plan = schedule.plan(0.0)
    assert not plan.preempted and not plan.chunks and not plan.goes_on, "its blocks are under a copy"
    assert schedule.abort(key(victim))
    with pytest.raises(RuntimeError, match="it is ABORTED"):
        schedule.prompts.preempted(key(victim))
    schedule.prompts.saved(key(victim))
    assert schedule.plan(0.0).new_prompts == [urgent]
    schedule.abort(key(urgent))
    schedule.prompts.saved(key(urgent))
    schedule.check_idle()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(40, 120),
    max_num_seqs=st.integers(1, 6),
    chunk_share=st.sampled_from([0.02, 0.05, 0.2]),
    be_share=st.sampled_from([0.0, 0.05]),
    rt_headroom=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_real_time_waits_for_its_own_and_one_chunk_and_everybody_ends(
    seed: int,
    num_blocks: int,
    max_num_seqs: int,
    chunk_share: float,
    be_share: float,
    rt_headroom: float,
) -> None:
    rng = random.Random(seed)
    limits = replace(LIMITS, num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_model_len=640)
    mix: dict[str, Any] = {"chunk_share": chunk_share, "be_share": be_share, "rt_headroom": rt_headroom}
    run = Run(schedule_of(limits=limits, **mix))
    objective_s = rng.choice([0.05, 0.3, 1.0])
    left = {"rt": rng.randint(1, 12), "be": rng.randint(1, 8)}
    # a block, and one of best effort if it is owed one
    least_s = PLAIN.iteration([(0, BLOCK)] * (2 if be_share else 1), [])
    # as much as has nearly the full pace
    sizes = range(1, LIMITS.max_num_batched_tokens // BLOCK + 1)
    enough = num_enough(sizes[-1], lambda count: PLAIN.iteration([(0, count * BLOCK)], []), ENOUGH)
    enough_s = PLAIN.iteration([(0, enough * BLOCK)], [])
    for _ in range(20_000):
        for kind in [kind for kind, num in left.items() if num and rng.random() < 0.2]:
            left[kind] -= 1
            length = rng.randint(1, 639)
            num_cached = rng.choice([0, 0, rng.randrange(0, length, BLOCK)])
            if kind == "rt":
                run.add(rt(length, run.now + objective_s, objective_s, num_cached))
            else:
                run.add(be(length, rng.choice([None, run.now + 1.0]), 10, num_cached))
        begun_s, waits = run.now, run.waiting
        plan = run.step()
        assert plan.chunks or plan.preempted or plan.loads or not any(waits.values()), "it stands still"
        has_rt = any(run.works[each].deadlines.is_rt for each, _ in plan.chunks)
        of_rt_s = max(run.tightest_s, enough_s) * (1 + MAX_STRETCH)
        bound_s = of_rt_s if has_rt else chunk_share * run.tightest_s
        assert run.now - begun_s <= max(bound_s, FLOOR * least_s) + 1e-9
        if waits[True] and be_share == 0.0:
            assert_real_time_goes_on(run, plan)
        assert_one_in_pieces(run)
        if not plan.goes_on and not any(left.values()) and len(run.done) == len(run.works):
            break
    assert len(run.done) == len(run.works) and not any(left.values())
    for each, work in run.works.items():
        assert run.tokens[each] == len(work.request.prompt) - work.num_cached, "computed once"
    run.schedule.check_idle()


def assert_real_time_goes_on(run: Run, plan: PrefillPlan) -> None:
    """Best effort in its iterations makes them hardly longer, or takes a small share of the time that it has left."""
    counts = {True: 0, False: 0}
    for each, count in plan.chunks:
        counts[run.works[each].deadlines.is_rt] += count
    if not counts[False]:
        return
    ran = {each for each, _ in plan.chunks}
    waiting = [
        work
        for each, work in run.works.items()
        if work.deadlines.is_rt and (each in ran or each not in run.done)
    ]
    # `step` has passed the iteration's time already.
    seconds = 0.01 + sum(counts.values()) * 0.001
    left_s = min(work.deadlines.first_due_s for work in waiting) - (run.now - seconds)
    hardly_s = (1 + MAX_STRETCH) * (0.01 + counts[True] * 0.001) if counts[True] else 0.0
    assert seconds <= max(hardly_s, SPARE * left_s) + 1e-9


def assert_one_in_pieces(run: Run) -> None:
    in_pieces = [
        member.is_rt
        for member in run.schedule.prompts.started.values()
        if member.has_slot and member.work.num_cached < member.num_computed
    ]
    assert in_pieces.count(True) <= 1 and in_pieces.count(False) <= 1
