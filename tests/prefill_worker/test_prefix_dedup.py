"""Simultaneous prompts with a common prefix: it is computed once, and none of them waits in vain."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from alignedserve.instance.memory import BlockManager
from alignedserve.instance.prefix_cache import PrefixCache
from alignedserve.kv.held import Held
from alignedserve.prefill_worker.boundary import PrefillPlan
from alignedserve.prefill_worker.schedule import PrefillSchedule
from alignedserve.prefill_worker.scheduled_request import PromptState
from alignedserve.protocol.messages import Abort, InstanceLimits, Prefill, Work
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import POLICIES, make_policy
from alignedserve.scheduling.prefixes import block_hashes_of
from alignedserve.timing.deadlines import Deadlines
from alignedserve.timing.estimate import Estimate
from alignedserve.types import PoolBlockId, RequestKey
from tests.engine.helpers import greedy_params
from tests.prefill_worker import rig
from tests.prefill_worker.rig import Rig
from tests.prefill_worker.test_mixing import BLOCK, LIMITS, PLAIN, key
from tests.tiny_models import prompts
from tests.worker_parts import engine_of
from tests.works import make_work


class Kept(PrefixCache):
    """Blocks that were computed; nobody ever needs their room."""

    def __init__(self) -> None:
        super().__init__(BlockManager(0, LIMITS.span), is_enabled=True)
        self.hashes_kept: set[bytes] = set()

    def block_hashes(self, work: Work) -> Sequence[bytes]:
        if work.num_cached or work.request.params.prompt_logprobs is not None:
            return ()
        return block_hashes_of(tokens_of(work)[:-1], BLOCK, work.request.cache_salt)

    def num_found(self, block_hashes: Sequence[bytes], num_cached: int = 0) -> int:
        return BLOCK * len([*takewhile(self.hashes_kept.__contains__, block_hashes)])

    def take(self, work: Work, held: Held, max_blocks: int | None = None) -> int:
        return self.num_found(self.block_hashes(work))

    def has_computed(self, work: Work, count: int) -> None:
        self.hashes_kept.update(block_hashes_of(tokens_of(work)[:count], BLOCK, work.request.cache_salt))


class Run:
    """A schedule, and what becomes of its plans; copies take no time."""

    def __init__(
        self,
        policy: str = "aligned",
        limits: InstanceLimits = LIMITS,
        kept: Kept | None = None,
        has_cache: bool = True,
    ) -> None:
        self.kept = kept or Kept()
        self.works: dict[RequestKey, Work] = {}
        self.num_computed = 0
        self.ended: set[RequestKey] = set()
        self.schedule = PrefillSchedule(
            limits,
            0.0,
            make_policy(SchedulingConfig(policy)),
            Estimate(PLAIN),
            prefix_cache=self.kept if has_cache else None,
        )

    def order(self, *works: Work) -> None:
        self.works |= {key(work): work for work in works}
        self.schedule.prefill(works)

    def step(self, now: float = 0.0) -> PrefillPlan:
        plan = self.schedule.plan(now)
        for each in plan.preempted:
            self.schedule.prompts.preempted(each)
        for each, count in plan.chunks:
            self.schedule.prompts.computed(each, count)
            self.num_computed += count
            self.kept.has_computed(self.works[each], self.computed(each))
            if self.schedule.prompts.started[each].state is PromptState.SAVING:
                self.schedule.prompts.saved(each)
                self.ended.add(each)
        for work in plan.loads:
            self.schedule.prompts.loaded(key(work))
        return plan

    def computed(self, each: RequestKey) -> int:
        """Its tokens that have KV, wherever that is from."""
        prompts = self.schedule.prompts
        member = prompts.started.get(each) or prompts.waiting.get(each)
        return member.num_computed if member else len(tokens_of(self.works[each]))

    def started(self, now: float = 0.0) -> list[RequestKey]:
        return [key(work) for work in self.step(now).new_prompts]


def tokens_of(work: Work) -> list[int]:
    return work.request.prompt + work.output


def rt(prompt: list[int], due_s: float = math.inf, **changes: Any) -> Work:
    return made(prompt, Deadlines(is_rt=True, first_due_s=due_s, tbt_s=0.1), **changes)


def be(prompt: list[int], due_s: float = math.inf, **changes: Any) -> Work:
    return made(prompt, Deadlines(job_due_s=due_s), **changes)


def made(prompt: list[int], deadlines: Deadlines, num_cached: int = 0, **changes: Any) -> Work:
    work = make_work(1, 0, num_cached, deadlines=deadlines)
    return replace(work, request=replace(work.request, prompt=prompt, **changes))


def unlike(count: int, seed: int = 1) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(1000) for _ in range(count)]


COMMON = unlike(200)
# in whole blocks
NUM_SHARED = 192


def test_the_second_waits_for_the_first_and_shares_what_that_has_computed() -> None:
    run = Run()
    first, second, unlike_both = rt(COMMON), rt([*COMMON[:197], 1, 2, 3]), rt(unlike(100, seed=2))
    run.order(first, second, unlike_both)
    plan = run.step()
    assert plan.new_prompts == [first, unlike_both]
    plan = run.step()
    assert plan.new_prompts == [second] and plan.chunks == [(key(second), 200 - NUM_SHARED)]


def test_it_waits_no_longer_than_for_what_they_have_in_common() -> None:
    run = Run(limits=replace(LIMITS, max_num_batched_tokens=80))
    first, second = rt([*COMMON, *unlike(400, seed=2)]), rt([*COMMON, *unlike(20, seed=3)])
    run.order(first, second)
    assert [run.started() for _ in range(4)] == [[key(first)], [], [], [key(second)]]
    assert run.computed(key(first)) < 600, "there is more of it to come"
    assert run.computed(key(second)) >= NUM_SHARED


@pytest.mark.parametrize("policy", ["aligned", "priority", "fcfs"])
def test_whoever_waits_by_choice_keeps_nobody_from_starting(policy: str) -> None:
    run = Run(policy)
    # five slots' worth: the others would not get one if those that wait had theirs
    alike, others = [rt(COMMON) for _ in range(5)], [rt(unlike(30, seed)) for seed in (3, 4, 5)]
    run.order(*alike, *others)
    assert run.started() == [key(alike[0]), *map(key, others)]
    assert run.started() == [key(work) for work in alike[1:]]


def test_best_effort_gives_nothing_up_for_real_time_that_waits_by_choice() -> None:
    run = Run(limits=replace(LIMITS, max_num_seqs=2, max_num_batched_tokens=64))
    first, second, best_effort = rt(COMMON), rt(COMMON), be(unlike(500, seed=2))
    run.order(best_effort)
    run.step()
    run.order(first, second)
    while run.computed(key(first)) < NUM_SHARED:
        assert not run.step().preempted
    assert run.step().preempted == [key(best_effort)], "there is no slot for the second, and now it wants one"


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (rt(COMMON), rt(COMMON), True),
        (rt(COMMON, due_s=1.0), rt(COMMON, due_s=1.0), True),
        (rt(COMMON, due_s=1.0), rt(COMMON, due_s=2.0), True),
        (rt(COMMON), be(COMMON), True),
        (be(COMMON, due_s=60.0), be(COMMON, due_s=60.0), True),
        (be(COMMON), be(COMMON), True),
        # without a window it goes by arrival
        (be(COMMON), be(COMMON, due_s=60.0), True),
        (be(COMMON, due_s=60.0), be(COMMON), False),
        # for nobody who may be in less of a hurry
        (be(COMMON), rt(COMMON), False),
        (rt(COMMON), rt(COMMON, due_s=0.5), False),
        (be(COMMON, due_s=60.0), be(COMMON, due_s=50.0), False),
        # nor for little
        (rt(COMMON), rt([*COMMON[:48], *unlike(40, seed=2)]), False),
        (rt(COMMON), rt([*COMMON[:96], *unlike(100, seed=2)]), False),
        (rt(COMMON), rt([*COMMON[:96], *unlike(70, seed=2)]), True),
        (rt(COMMON[:60]), rt(COMMON), False),
        # nor where nothing will be shared
        (rt(COMMON), rt(COMMON, cache_salt="a"), False),
        (rt(COMMON), rt(COMMON, params=greedy_params(prompt_logprobs=0)), False),
        (rt(COMMON), rt(COMMON, num_cached=16), False),
        (rt([1, *COMMON]), rt(COMMON), False),
    ],
)
def test_who_waits_for_whom(first: Work, second: Work, waits: bool) -> None:
    run = Run(limits=replace(LIMITS, max_num_batched_tokens=16))
    run.order(first)
    run.step()
    run.order(second)
    assert run.started() == ([] if waits else [key(second)])


def test_real_time_waits_for_its_own_where_best_effort_begins_alike_too() -> None:
    run = Run(limits=replace(LIMITS, max_num_batched_tokens=16))
    run.order(be([*COMMON, 1]))
    run.step()
    first, second = rt(COMMON), rt(COMMON)
    run.order(first, second)
    assert run.started() == [key(first)]


def test_where_nothing_is_shared_nobody_waits() -> None:
    run = Run(has_cache=False)
    run.order(rt(COMMON), rt(COMMON))
    assert len(run.started()) == 2


def test_if_the_first_is_aborted_the_next_takes_its_place() -> None:
    run = Run(limits=replace(LIMITS, max_num_batched_tokens=16))
    works = [rt(COMMON) for _ in range(3)]
    run.order(*works)
    assert run.started() == [key(works[0])]
    run.schedule.abort(key(works[0]))
    assert run.started() == [key(works[1])]
    run.schedule.prompts.saved(key(works[0]))


def test_who_has_its_beginning_waits_for_nobody_who_computes_it_anew() -> None:
    """Prompts whose log-probabilities are wanted are computed whole, and there may always be another of them."""
    run, whole = Run(limits=replace(LIMITS, max_num_batched_tokens=16)), greedy_params(prompt_logprobs=0)
    run.kept.has_computed(rt(COMMON), NUM_SHARED)
    run.order(rt(COMMON, params=whole))
    run.step()
    run.order(second := rt([*COMMON, 1, 2, 3]))
    assert run.started() == [key(second)]


def test_the_parts_of_a_text_that_is_there_go_together() -> None:
    run, text = Run(limits=replace(LIMITS, max_num_seqs=8)), unlike(400)
    run.kept.has_computed(rt(text), 320)
    parts = [rt(text[:length]) for length in (360, 340, 330)]
    run.order(*parts)
    assert run.started() == [key(work) for work in parts]


def test_nobody_waits_for_who_can_not_make_it_any_more() -> None:
    run = Run(limits=replace(LIMITS, max_num_batched_tokens=16))
    late, other = rt(COMMON, due_s=0.1), rt(COMMON, due_s=2.0)
    run.order(late)
    run.step()
    run.order(other)
    assert run.started() == [key(other)], "ten seconds later than others is its turn"


def test_a_short_job_waits_for_no_long_one_that_begins_alike() -> None:
    run = Run(limits=replace(LIMITS, max_num_batched_tokens=16))
    long = be([*COMMON, *unlike(800, seed=2)])
    run.order(long)
    run.step()
    run.order(short := be([*COMMON, *unlike(60, seed=3)]))
    assert run.started() == [key(short)]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(list(POLICIES)), st.integers(1, 300))
def test_everybody_ends_and_no_more_is_computed_than_without_sharing(
    dice: random.Random, policy: str, max_tokens: int
) -> None:
    beginnings = [unlike(length, seed) for seed, length in enumerate((0, 100, 300))]

    def any_work() -> Work:
        prompt = dice.choice(beginnings) + unlike(dice.randint(1, 150), dice.randrange(3))
        due_s = dice.choice([math.inf, dice.uniform(0.1, 20.0)])
        params = greedy_params(prompt_logprobs=0) if dice.random() < 0.1 else greedy_params()
        return dice.choice([rt, be])(prompt, due_s=due_s, params=params)

    works, limits = [any_work() for _ in range(20)], replace(LIMITS, max_num_batched_tokens=max_tokens)
    runs = [Run(policy, limits), Run(policy, limits, has_cache=False)]
    for run in runs:
        for number in range(10_000):
            run.order(*works[number : number + 1])
            run.step(now=0.05 * number)
            if len(run.ended) == len(works):
                break
        assert run.ended == set(run.works)
        run.schedule.check_idle()
    sharing, alone = runs
    assert sharing.num_computed <= alone.num_computed


# ---- on an engine ---------------------------------------------------------------------------------------------------

Directory = Callable[[str], Path]
PROMPT, NUM_CHOICES = prompts()[8][:100], 4


@pytest.fixture
def instance(tiny_model: Directory) -> Iterator[Rig]:
    with closing(Rig(tiny_model("llama-gqa-tied"), enable_prefix_caching=True)) as rig:
        yield rig


def choice(number: int) -> Work:
    work = rig.work(PROMPT, key=RequestKey(number + 1))
    return replace(work, blocks=[PoolBlockId(block) for block in range(number * 16, number * 16 + 7)])


def test_the_choices_of_one_call_compute_its_prompt_once(instance: Rig) -> None:
    instance.worker.on(Prefill([choice(number) for number in range(NUM_CHOICES)]))
    instance.step_until(
        lambda: len(instance.news) == NUM_CHOICES and not engine_of(instance.worker).num_unfinished
    )
    assert sorted(news.num_reused for news in instance.news) == [0, 96, 96, 96]
    assert sum(report.num_computed for report in instance.reports) == 100 + 3 * 4
    assert len({tuple(news.tokens) for news in instance.news}) == 1
    first, *others = (instance.pool[number * 16 : number * 16 + 6] for number in range(NUM_CHOICES))
    assert first.any() and all(np.array_equal(each, first) for each in others)
    instance.check_idle()


@pytest.mark.parametrize("num_steps", range(4))
def test_the_others_go_on_when_one_is_aborted(instance: Rig, num_steps: int) -> None:
    instance.worker.on(Prefill([choice(number) for number in range(NUM_CHOICES)]))
    for _ in range(num_steps):
        instance.step()
    instance.worker.on(Abort([RequestKey(1)]))
    left = {RequestKey(number + 1) for number in range(1, NUM_CHOICES)}
    instance.step_until(lambda: left <= {news.key for news in instance.news})
    assert len({tuple(news.tokens) for news in instance.news}) == 1
    instance.step_until(lambda: not engine_of(instance.worker).num_unfinished)
    instance.check_idle()
