"""The schedule against a fabricated router and engine, in virtual time: counts only."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from alignedserve.decode_worker.plan import DecodePlan
from alignedserve.decode_worker.schedule import DecodeSchedule
from alignedserve.kv.layout import INPUTS
from alignedserve.protocol.messages import InstanceLimits, Work
from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import DecodeBoundary
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import DecodePart
from alignedserve.timing.deadlines import Deadlines
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestKey
from tests.sim.islands import COST
from tests.works import make_work

BLOCK = 4
LIMITS = InstanceLimits(
    num_blocks=20, block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=60
)


def ahead(evict: int, admit: int | None, fill_mark: float = 1.0) -> DecodePart:
    config = SchedulingConfig(evict_ahead=evict, admit_ahead=admit, fill_mark=fill_mark)
    return make_policy(config).decode(LIMITS, None)


# no thought of the future
NEXT_ONLY = ahead(1, 1)


def real_time(prompt_len: int, **more: Any) -> Work:
    return make_work(prompt_len, deadlines=Deadlines(is_rt=True, first_due_s=0.0, tbt_s=0.1), **more)


def keys(works: list[Work]) -> list[RequestKey]:
    return [work.request.key for work in works]


def admit_all(schedule: DecodeSchedule) -> DecodePlan:
    plan = schedule.plan(0.0)
    for key in keys(plan.pulls):
        assert schedule.blocks.pulled(key)
    return plan


def iterate(schedule: DecodeSchedule) -> DecodePlan:
    plan = schedule.plan(0.0)
    schedule.sampled(plan.run)
    return plan


class DropsFirst(DecodePart):
    """Drops who has run longest, whenever two run."""

    def plan(self, at: DecodeBoundary) -> None:
        at.evict(at.running)
        at.drop(at.running[:1] if len(at.running) > 1 else [])
        decoding.run_all(at)
        decoding.admit_in_order(at, self.config)


# ---- rules ----------------------------------------------------------------------------------------------------------


def test_candidate_requests_come_before_the_candidate_batch() -> None:
    schedule = DecodeSchedule(LIMITS, NEXT_ONLY)
    batch, request = [make_work(8), make_work(8)], make_work(8)
    schedule.offer(batch, is_batch=True)
    schedule.offer([request], is_batch=False)
    assert keys(schedule.plan(0.0).pulls) == keys([request, *batch])


def test_who_is_dropped_leaves_its_blocks_to_others_in_the_same_plan() -> None:
    schedule = DecodeSchedule(LIMITS, DropsFirst(LIMITS, SchedulingConfig(evict_ahead=1, admit_ahead=1)))
    first, second, third = make_work(30), make_work(30), make_work(30)
    schedule.offer([first, second], is_batch=False)
    admit_all(schedule)
    schedule.offer([third], is_batch=False)
    plan = schedule.plan(0.0)
    assert plan.drops == keys([first]) and plan.wants_evicted == plan.run == keys([second])
    assert plan.pulls == [third]
    schedule.check()
    schedule.offer([first], is_batch=False)
    for work in (second, third, first):
        schedule.abort(work.request.key)
    assert schedule.blocks.num_free == LIMITS.num_blocks - 8  # The third is under a copy.


def test_only_who_runs_and_is_not_planned_can_be_dropped() -> None:
    class DropsAfter(DecodePart):
        def plan(self, at: DecodeBoundary) -> None:
            decoding.run_all(at)
            at.drop(at.running)
            decoding.admit_in_order(at, self.config)

    schedule = DecodeSchedule(LIMITS, DropsAfter(LIMITS, SchedulingConfig(evict_ahead=1, admit_ahead=1)))
    schedule.offer([work := make_work(8)], is_batch=False)
    admit_all(schedule)
    with pytest.raises(RuntimeError, match=f"request {work.request.key}: to be dropped, but"):
        schedule.plan(0.0)


class KeepsInputs(DecodePart):
    """Keeps the inputs of every prompt, and evicts who has five tokens."""

    def plan(self, at: DecodeBoundary) -> None:
        at.evict([request for request in at.running if request.num_tokens >= 35])
        decoding.run_all(at)
        for request in at.requests:
            at.admit(request, INPUTS)


def test_inputs_take_half_the_blocks_and_cannot_be_evicted() -> None:
    limits = replace(LIMITS, max_restored_blocks=40)
    schedule = DecodeSchedule(limits, KeepsInputs(limits, SchedulingConfig()))
    schedule.offer([work := make_work(30, output_len=0, num_cached=0)], is_batch=False)
    plan = schedule.plan(0.0)
    assert plan.new_prompts == [work]
    assert schedule.blocks[work.request.key].layout is INPUTS
    num_held = LIMITS.num_blocks - schedule.blocks.num_free
    assert num_held == -(-30 // (2 * LIMITS.block_size))
    with pytest.raises(RuntimeError, match="have no KV that could go on, and can only be dropped"):
        for _ in range(6):
            iterate(schedule)
    schedule.check()


def test_inputs_are_kept_only_of_a_prompt_and_where_they_can_be() -> None:
    for limits, num_cached in ((LIMITS, 0), (replace(LIMITS, max_restored_blocks=40), 29)):
        schedule = DecodeSchedule(limits, KeepsInputs(limits, SchedulingConfig()))
        schedule.offer([make_work(30, output_len=1, num_cached=num_cached)], is_batch=False)
        with pytest.raises(RuntimeError, match="its inputs can't be kept"):
            schedule.plan(0.0)


def test_the_batch_waits_while_a_candidate_request_does() -> None:
    schedule = DecodeSchedule(LIMITS, NEXT_ONLY)
    schedule.offer([make_work(40), make_work(41)], is_batch=False)
    schedule.offer([make_work(4)], is_batch=True)
    assert len(schedule.plan(0.0).pulls) == 1


def test_the_batch_is_admitted_below_the_fill_mark_only() -> None:
    schedule = DecodeSchedule(LIMITS, ahead(1, 1, 0.5))
    schedule.offer([make_work(16) for _ in range(4)], is_batch=True)
    # 17 tokens are 5 blocks: 10 of 20 are the mark
    assert len(admit_all(schedule).pulls) == 2
    assert len(schedule.candidates) == 2
    schedule.offer([make_work(16)], is_batch=False)
    assert len(schedule.plan(0.0).pulls) == 1, "candidate requests know no mark"


def test_a_batch_leaves_no_block_unused() -> None:
    schedule = DecodeSchedule(LIMITS, ahead(4, 32))
    schedule.offer([make_work(16, max_tokens=4) for _ in range(4)], is_batch=True)
    assert len(admit_all(schedule).pulls) == 4 and schedule.blocks.num_free == 0


def test_slots_bound_admission() -> None:
    limits = InstanceLimits(
        num_blocks=100, block_size=BLOCK, max_num_seqs=3, max_num_batched_tokens=8, max_model_len=60
    )
    schedule = DecodeSchedule(limits, NEXT_ONLY)
    schedule.offer([make_work(4) for _ in range(5)], is_batch=False)
    assert len(admit_all(schedule).pulls) == 3
    assert not schedule.plan(0.0).pulls
    key = iterate(schedule).run[0]
    schedule.blocks.ended(key)
    assert len(schedule.plan(0.0).pulls) == 1


def test_admission_leaves_what_the_running_need_soon() -> None:
    """13 blocks in use and 7 free; in the next 8 iterations the running one takes up to 2 of them."""
    schedule = DecodeSchedule(LIMITS, ahead(1, 9))
    schedule.offer([make_work(48, max_tokens=12)], is_batch=False)
    admit_all(schedule)
    assert schedule.blocks.num_free == 7
    schedule.offer([make_work(24, max_tokens=2)], is_batch=False)
    assert not schedule.plan(0.0).pulls, "7 blocks, and none for the running one"
    other = DecodeSchedule(LIMITS, ahead(1, 9))
    other.offer([make_work(48, max_tokens=12), make_work(16, max_tokens=2)], is_batch=False)
    assert len(other.plan(0.0).pulls) == 2, "5 blocks, and 2 for the running one"


def test_whoever_is_alone_fits() -> None:
    limits = InstanceLimits(
        num_blocks=15, block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=60
    )
    schedule = DecodeSchedule(limits, ahead(4, 32))
    work = make_work(50)
    schedule.offer([work], is_batch=True)
    admit_all(schedule)
    for _ in range(51, 60):
        assert iterate(schedule).run == keys([work])
    schedule.blocks.ended(work.request.key)
    schedule.check_idle()


def full(policy: DecodePart, *works: Work, is_batch: bool = False) -> DecodeSchedule:
    schedule = DecodeSchedule(LIMITS, policy)
    for number, work in enumerate(works, start=1):
        schedule.offer([work], is_batch, batch=number if is_batch else 0)
    admit_all(schedule)
    assert len(schedule.blocks.running) == len(works)
    return schedule


def test_the_longest_gives_way_when_blocks_run_out() -> None:
    short, long, middle = make_work(15), make_work(31), make_work(23)
    schedule = full(NEXT_ONLY, short, long, middle)
    assert schedule.blocks.num_free == 20 - 4 - 8 - 6
    filler = make_work(7)
    schedule.offer([filler], is_batch=False)
    admit_all(schedule)
    assert schedule.blocks.num_free == 0
    plan = iterate(schedule)
    assert len(plan.run) == 4 and not plan.wants_evicted, "all blocks have a last slot"
    plan = iterate(schedule)
    assert plan.wants_evicted == keys([long])
    assert plan.run == [], "nobody has a block for one more token"
    assert schedule.blocks.evict(long.request.key)
    assert schedule.plan(0.0).run == [], "its blocks are under a copy"
    assert schedule.blocks.evicted(long.request.key)
    assert sorted(iterate(schedule).run) == sorted(keys([short, middle, filler]))
    schedule.check()


def test_victims_are_named_early_and_run_on_while_they_fit() -> None:
    short, long = make_work(31), make_work(34)
    schedule = full(ahead(4, 4), short, long)
    for _ in range(3):
        assert not iterate(schedule).wants_evicted
    # 9 + 10 blocks, one free; in four iterations both need another
    for _ in range(3):
        plan = iterate(schedule)
        assert plan.wants_evicted == keys([long])
        assert len(plan.run) == 2, "there is room in their last blocks, and one more"
    plan = iterate(schedule)
    assert plan.wants_evicted == keys([long]) and plan.run == keys([short])


def test_a_victim_takes_no_new_block() -> None:
    short, long = make_work(26), make_work(34)
    schedule = full(ahead(4, 4), short, long)
    schedule.offer([make_work(1)], is_batch=False)
    admit_all(schedule)
    for _ in range(6):
        iterate(schedule)
    assert schedule.blocks.num_free == 0
    plan = iterate(schedule)
    assert plan.wants_evicted == keys([long]) and long.request.key not in plan.run


def test_the_older_batch_gives_way_first() -> None:
    old, new = make_work(15), make_work(47)
    schedule = full(NEXT_ONLY, old, new, is_batch=True)
    schedule.offer([make_work(15)], is_batch=False, batch=2)
    admit_all(schedule)
    assert schedule.blocks.num_free == 0
    iterate(schedule)
    assert schedule.plan(0.0).wants_evicted == keys([old]), "though others are longer"


def test_best_effort_gives_way_before_deadlines() -> None:
    best_effort = make_work(15)
    schedule = full(NEXT_ONLY, real_time(15), best_effort, real_time(47))
    assert schedule.blocks.num_free == 0
    iterate(schedule)
    assert schedule.plan(0.0).wants_evicted == keys([best_effort]), "though others are longer"


def test_a_victim_is_none_any_more_when_others_end() -> None:
    short, long = make_work(39), make_work(39)
    schedule = full(NEXT_ONLY, short, long)
    iterate(schedule)
    (victim,) = iterate(schedule).wants_evicted
    other = ({short.request.key, long.request.key} - {victim}).pop()
    schedule.blocks.ended(other)
    plan = schedule.plan(0.0)
    assert plan.run == [victim] and not plan.wants_evicted


def test_missing_kv_is_computed_in_chunks_beside_the_others() -> None:
    schedule = full(NEXT_ONLY, make_work(4), make_work(50, num_cached=10))
    plan = schedule.plan(0.0)
    ((behind, count),) = plan.chunks
    (ready,) = plan.run
    assert count == LIMITS.max_num_batched_tokens - 1
    schedule.sampled(plan.run)
    schedule.computed(behind, count)
    plan = schedule.plan(0.0)
    assert sorted(plan.run) == sorted([ready, behind]) and not plan.chunks
    schedule.sampled(plan.run)
    assert max(request.num_tokens for request in schedule.blocks.running.values()) == 52


# ---- orders that cross ----------------------------------------------------------------------------------------------


def test_evict_comes_too_late_for_what_has_ended() -> None:
    work = make_work(8)
    schedule = full(NEXT_ONLY, work)
    schedule.blocks.ended(work.request.key)
    assert not schedule.blocks.evict(work.request.key)


def test_abort_holds_blocks_under_a_copy_until_it_is_reported() -> None:
    schedule = DecodeSchedule(LIMITS, NEXT_ONLY)
    work = make_work(8)
    schedule.offer([work], is_batch=False)
    schedule.plan(0.0)
    assert schedule.abort(work.request.key)
    assert schedule.blocks.num_free == 17
    assert not schedule.blocks.pulled(work.request.key)
    schedule.check_idle()

    schedule.offer([work], is_batch=False)
    admit_all(schedule)
    assert schedule.blocks.evict(work.request.key) and schedule.abort(work.request.key)
    assert not schedule.blocks.evicted(work.request.key)
    schedule.check_idle()

    schedule.offer([work], is_batch=False)
    admit_all(schedule)
    assert not schedule.abort(work.request.key), "nothing is under a copy"
    schedule.check_idle()


def test_failed_copies() -> None:
    schedule = DecodeSchedule(LIMITS, NEXT_ONLY)
    work = make_work(8)
    schedule.offer([work], is_batch=False)
    schedule.plan(0.0)
    schedule.blocks.pull_failed(work.request.key)
    schedule.check_idle()
    schedule.offer([work], is_batch=False)
    admit_all(schedule)
    schedule.blocks.evict(work.request.key)
    assert schedule.plan(0.0).run == []
    assert schedule.blocks.evict_failed(work.request.key)
    assert schedule.plan(0.0).run == keys([work])


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match="num_blocks=3: a request of max_model_len=60 needs 15"):
        DecodeSchedule(
            InstanceLimits(
                num_blocks=3, block_size=4, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=60
            ),
            NEXT_ONLY,
        )
    schedule = DecodeSchedule(LIMITS, ahead(4, 32))
    work = make_work(8)
    schedule.offer([work], is_batch=False)
    with pytest.raises(RuntimeError, match="offered, but it is here already"):
        schedule.offer([work], is_batch=True)
    with pytest.raises(ValueError, match="tokens cached"):
        schedule.offer([make_work(60)], is_batch=False)
    with pytest.raises(ValueError, match="tokens cached"):
        schedule.offer([make_work(8, num_cached=9)], is_batch=False)


# ---- everything at once ---------------------------------------------------------------------------------------------


@dataclass
class World:
    """A router that evicts when asked, and offers what it evicted again; copies that take their time."""

    rng: random.Random
    schedule: DecodeSchedule
    limits: InstanceLimits
    lengths: dict[RequestKey, int] = field(default_factory=dict)
    cached: dict[RequestKey, int] = field(default_factory=dict)
    pulling: set[RequestKey] = field(default_factory=set)
    running: set[RequestKey] = field(default_factory=set)
    leaving: set[RequestKey] = field(default_factory=set)
    aborted: set[RequestKey] = field(default_factory=set)
    outside: list[RequestKey] = field(default_factory=list)
    wanted: list[RequestKey] = field(default_factory=list)
    num_finished: int = 0

    def arrive(self) -> None:
        prompt_len = self.rng.randint(1, 40)
        work = make_work(
            prompt_len,
            max_tokens=self.rng.choice([None, 2, 9]),
            deadlines=self.rng.choice([Deadlines(), Deadlines(is_rt=True, first_due_s=0.0, tbt_s=0.1)]),
        )
        key = work.request.key
        self.lengths[key], self.cached[key] = (
            prompt_len + 1,
            self.rng.randint(max(0, prompt_len - 20), prompt_len),
        )
        self.works[key] = work
        self.outside.append(key)

    works: dict[RequestKey, Work] = field(default_factory=dict)

    def offer(self) -> None:
        chosen, self.outside = self.outside, []
        works = []
        for key in chosen:
            known = self.works[key]
            output = [0] * (self.lengths[key] - len(known.request.prompt))
            works.append(Work(known.request, output, self.cached[key], []))
        self.schedule.offer(works, is_batch=self.rng.random() < 0.5)

    def ends_at(self, key: RequestKey) -> int:
        request = self.works[key].request
        return min(
            self.limits.max_model_len,
            len(request.prompt) + (request.params.max_tokens or self.limits.max_model_len),
        )

    def step(self) -> bool:
        plan = self.schedule.plan(0.0)
        self.schedule.check()
        self.pulling |= set(keys(plan.pulls))
        # of these there is no KV, and nothing to wait for
        self.running |= set(keys(plan.new_prompts))
        assert self.running >= {*plan.run, *plan.wants_evicted}
        num_tokens = sum(self.lengths[key] - self.cached[key] for key in plan.run)
        num_tokens += sum(count for _, count in plan.chunks)
        assert num_tokens <= self.limits.max_num_batched_tokens
        assert len(self.running) + len(self.pulling - self.aborted) <= self.limits.max_num_seqs
        for key, count in plan.chunks:
            self.schedule.computed(key, count)
            self.cached[key] += count
        self.schedule.sampled(plan.run)
        for key in plan.run:
            self.cached[key] = self.lengths[key]
            self.lengths[key] += 1
            if self.lengths[key] == self.ends_at(key):
                self.schedule.blocks.ended(key)
                self.running.remove(key)
                self.num_finished += 1
        self.wanted = [key for key in plan.wants_evicted if key in self.running]
        return plan.goes_on

    def end_copies(self, share: float) -> bool:
        ended = [key for key in sorted(self.pulling | self.leaving) if self.rng.random() < share]
        for key in ended:
            if key in self.pulling:
                self._pull_ended(key)
            else:
                self._evict_ended(key)
        return bool(ended)

    def _pull_ended(self, key: RequestKey) -> None:
        self.pulling.remove(key)
        if self.rng.random() < 0.1:
            self.schedule.blocks.pull_failed(key)
            if key not in self.aborted:
                self.outside.append(key)
        elif self.schedule.blocks.pulled(key):
            assert key not in self.aborted
            self.running.add(key)

    def _evict_ended(self, key: RequestKey) -> None:
        self.leaving.remove(key)
        if self.rng.random() < 0.1:
            if self.schedule.blocks.evict_failed(key):
                self.running.add(key)
        elif self.schedule.blocks.evicted(key):
            self.outside.append(key)

    def evict_wanted(self, share: float) -> bool:
        chosen = [key for key in self.wanted if self.rng.random() < share]
        for key in chosen:
            assert self.schedule.blocks.evict(key)
            self.running.remove(key)
            self.leaving.add(key)
        self.wanted = [key for key in self.wanted if key not in chosen]
        return bool(chosen)

    def abort_one(self) -> None:
        known = [
            key for key in self.works if key not in self.aborted and self.lengths[key] < self.ends_at(key)
        ]
        if not known:
            return
        key = self.rng.choice(known)
        self.aborted.add(key)
        is_held = self.schedule.abort(key)
        assert is_held == (key in self.pulling | self.leaving)
        self.running.discard(key)
        self.outside = [other for other in self.outside if other != key]
        self.wanted = [other for other in self.wanted if other != key]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(15, 40),
    max_num_seqs=st.integers(1, 8),
    evict_ahead=st.integers(1, 8),
    num_more_ahead=st.none() | st.integers(0, 32),
    fill_mark=st.floats(0.1, 1.0),
)
def test_every_request_ends_and_every_plan_fits(
    seed: int,
    num_blocks: int,
    max_num_seqs: int,
    evict_ahead: int,
    num_more_ahead: int | None,
    fill_mark: float,
) -> None:
    rng = random.Random(seed)
    limits = InstanceLimits(
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.randint(0, 20),
        max_model_len=60,
    )
    admit_ahead = None if num_more_ahead is None else evict_ahead + num_more_ahead
    schedule = DecodeSchedule(limits, ahead(evict_ahead, admit_ahead, fill_mark))
    world = World(rng, schedule, limits)
    num_arrivals = rng.randint(1, 25)
    for turn in range(10_000):
        if turn % 3 == 0 and len(world.works) < num_arrivals:
            world.arrive()
        if world.outside and rng.random() < 0.5:
            world.offer()
        if rng.random() < 0.02:
            world.abort_one()
        has_run = world.step()
        has_moved = world.end_copies(0.5) | world.evict_wanted(0.5)
        if len(world.works) == num_arrivals and world.num_finished + len(world.aborted) == num_arrivals:
            break
        if not (has_run or has_moved or world.pulling or world.leaving or world.wanted):
            assert world.outside or len(world.works) < num_arrivals, "nothing runs, and nothing will"
    assert world.num_finished + len(world.aborted) == num_arrivals, "not all ended"
    while world.pulling or world.leaving:
        world.end_copies(1.0)
    schedule.check_idle()


def test_earlier_batches_leave_for_one_that_runs_in_their_place() -> None:
    """Best effort that is left of them: real time stays, and so does what belongs to no batch."""
    limits = replace(LIMITS, num_blocks=100)
    schedule = DecodeSchedule(limits, make_policy(SchedulingConfig()).decode(limits, Estimate(COST)))
    first, second, person, stray = make_work(15), make_work(15), real_time(15), make_work(15)
    schedule.offer([first, person], is_batch=True, batch=1)
    schedule.offer([second], is_batch=False, batch=1)
    schedule.offer([stray], is_batch=False)
    admit_all(schedule)
    assert not schedule.plan(0.0).wants_evicted
    following = [make_work(40), make_work(41)]
    schedule.offer(following, is_batch=True, batch=2, replaces=True)
    assert sorted(schedule.plan(0.0).wants_evicted) == sorted(keys([first, second]))
    for key in keys([first, second]):
        assert schedule.blocks.evict(key) and schedule.blocks.evicted(key)
    assert not schedule.plan(0.0).wants_evicted


def test_an_iteration_with_requests_of_several_batches_is_mixed() -> None:
    limits = replace(LIMITS, num_blocks=100)
    schedule = DecodeSchedule(limits, NEXT_ONLY)
    schedule.offer([make_work(15)], is_batch=False)
    admit_all(schedule)
    assert not schedule.is_mixed(schedule.plan(0.0)), "there is no batch"
    schedule.offer([make_work(15), make_work(16)], is_batch=True, batch=1)
    admit_all(schedule)
    assert schedule.is_mixed(schedule.plan(0.0))
    alone = DecodeSchedule(limits, NEXT_ONLY)
    alone.offer([make_work(15)], is_batch=True, batch=1)
    alone.offer([make_work(16)], is_batch=True, batch=1)
    admit_all(alone)
    assert not alone.is_mixed(alone.plan(0.0)), "parts of one batch"
    alone.offer([make_work(30)], is_batch=False, batch=1)
    admit_all(alone)
    assert not alone.is_mixed(alone.plan(0.0)), "it joined the batch"
    alone.offer([make_work(30)], is_batch=True, batch=2)
    admit_all(alone)
    assert alone.is_mixed(alone.plan(0.0))


def test_an_iteration_restores_no_more_than_there_is_room_for() -> None:
    """Each of the three has 30 tokens, and two find room."""
    limits = replace(LIMITS, max_restored_blocks=2 * -(-30 // BLOCK) + 1, max_num_batched_tokens=512)
    part = KeepsInputs(limits, SchedulingConfig())
    schedule = DecodeSchedule(limits, part)
    works = [make_work(30, output_len=0, num_cached=0) for _ in range(3)]
    schedule.offer(works, is_batch=False)
    assert schedule.plan(0.0).new_prompts == works
    for expected in (works[:2], works[:2]):
        # Nobody has computed anything: all of it is pending.
        plan = schedule.plan(0.0)
        assert plan.run == keys(expected)
