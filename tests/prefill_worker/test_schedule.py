"""The schedule against a fabricated router and engine, in virtual time: counts only."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.prefill_worker.schedule import PrefillSchedule
from alignedserve.protocol.messages import InstanceLimits, Work
from alignedserve.types import RequestKey
from tests.works import make_work

BLOCK = 4
LIMITS = InstanceLimits(
    num_blocks=30, block_size=BLOCK, max_num_seqs=3, max_num_batched_tokens=16, max_model_len=60
)


def prompt(length: int, num_cached: int = 0) -> Work:
    return make_work(length, output_len=0, num_cached=num_cached)


def keys(works: list[Work]) -> list[RequestKey]:
    return [work.request.key for work in works]


def compute(schedule: PrefillSchedule) -> list[int]:
    chunks = schedule.plan(0.0).chunks
    for key, count in chunks:
        schedule.prompts.computed(key, count)
    return [count for _, count in chunks]


def test_prompts_are_cut_into_chunks_in_the_order_in_which_they_came() -> None:
    schedule = PrefillSchedule(LIMITS)
    first, second, third = prompt(20), prompt(30), prompt(3)
    schedule.prefill([first, second, third])
    assert [compute(schedule) for _ in range(5)] == [[16], [4, 12], [16], [2, 3], []]
    for work in (first, second, third):
        schedule.prompts.saved(work.request.key)
    schedule.check_idle()


def test_blocks_are_held_until_the_kv_is_saved() -> None:
    schedule = PrefillSchedule(LIMITS)
    first, second = prompt(59), prompt(59)
    third = prompt(4)
    schedule.prefill([first, second, third])
    while compute(schedule):
        pass
    assert schedule.memory.num_free == 0, "two prompts of 15 blocks, and no room for the third"
    schedule.prompts.saved(second.request.key)
    assert compute(schedule) == [4]
    with pytest.raises(RuntimeError, match="to enter SAVED, but it is COMPUTING"):
        schedule.prefill([other := prompt(20)])
        schedule.plan(0.0)
        schedule.prompts.saved(other.request.key)


def test_cached_kv_is_loaded_before_the_rest_is_computed() -> None:
    schedule = PrefillSchedule(LIMITS)
    cached, plain = prompt(20, num_cached=15), prompt(10)
    schedule.prefill([cached, plain])
    plan = schedule.plan(0.0)
    assert plan.new_prompts == [cached, plain] and plan.loads == [cached]
    assert plan.chunks == [(plain.request.key, 10)], "nobody waits for the copy"
    schedule.prompts.computed(plain.request.key, 10)
    assert schedule.plan(0.0).chunks == []
    assert schedule.prompts.loaded(cached.request.key)
    assert schedule.plan(0.0).chunks == [(cached.request.key, 5)]


def test_slots_bound_what_is_computed_at_once_but_not_what_is_saved() -> None:
    schedule = PrefillSchedule(LIMITS)
    works = [prompt(4) for _ in range(5)]
    schedule.prefill(works)
    assert keys(schedule.plan(0.0).new_prompts) == keys(works[:3])
    assert compute(schedule) == [4, 4, 4]
    assert compute(schedule) == [4, 4]


def test_candidates_have_a_share_and_within_it_come_first() -> None:
    schedule = PrefillSchedule(LIMITS, staging_share=0.4)
    staged = [make_work(15) for _ in range(4)]
    schedule.stage(staged)
    schedule.prefill([prompt(40), prompt(40)])
    plan = schedule.plan(0.0)
    assert keys(plan.stages) == keys(staged[:3]), "12 of 30 blocks are for candidates, 4 each"
    assert len(plan.new_prompts) == 1, "18 for the prompts"
    for work in staged[:3]:
        assert schedule.stages.staged(work.request.key)
    schedule.stages.unstage(staged[0].request.key)
    assert keys(schedule.plan(0.0).stages) == keys(staged[3:])


def test_a_candidate_that_waits_for_blocks_holds_new_prompts_back() -> None:
    schedule = PrefillSchedule(LIMITS, staging_share=0.4)
    first, second = prompt(57), prompt(57)
    schedule.prefill([first, second])
    schedule.plan(0.0)
    candidate, third = make_work(40), prompt(4)
    schedule.stage([candidate])
    schedule.prefill([third])
    assert schedule.plan(0.0).new_prompts == [], "no block is free"
    assert not schedule.abort(third.request.key)
    schedule.prefill([fourth := prompt(57)])
    schedule.abort(first.request.key)
    schedule.prompts.saved(first.request.key)
    plan = schedule.plan(0.0)
    assert plan.stages == [candidate] and plan.new_prompts == []
    schedule.abort(second.request.key)
    schedule.prompts.saved(second.request.key)
    assert schedule.plan(0.0).new_prompts == [fourth]


def test_abort_holds_blocks_until_the_copy_is_reported() -> None:
    schedule = PrefillSchedule(LIMITS)
    loading, computing, staging, waiting = prompt(20, num_cached=8), prompt(20), make_work(9), prompt(59)
    schedule.prefill([loading, computing, other := prompt(59), waiting])
    schedule.stage([staging])
    schedule.plan(0.0)
    num_free = schedule.memory.num_free
    assert schedule.abort(loading.request.key)
    assert schedule.abort(computing.request.key)
    assert schedule.abort(staging.request.key)
    assert not schedule.abort(waiting.request.key)
    assert schedule.memory.num_free == num_free
    assert [key for key, _ in schedule.plan(0.0).chunks] == keys([other])
    assert not schedule.prompts.loaded(loading.request.key)
    assert not schedule.stages.staged(staging.request.key)
    schedule.prompts.saved(computing.request.key)
    schedule.abort(other.request.key)
    schedule.prompts.saved(other.request.key)
    schedule.check_idle()


def test_unstaging_what_is_on_its_way_or_unknown() -> None:
    schedule = PrefillSchedule(LIMITS)
    on_its_way, waiting = make_work(9), make_work(50)
    schedule.stage([on_its_way, waiting])
    schedule.plan(0.0)
    for key in (*keys([on_its_way, waiting]), RequestKey(0)):
        schedule.stages.unstage(key)
    assert schedule.stages.num_blocks == 3
    assert not schedule.stages.staged(on_its_way.request.key)
    schedule.check_idle()


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match="num_blocks=3: a request of max_model_len=60 needs 15"):
        PrefillSchedule(InstanceLimits(num_blocks=3, block_size=4, max_num_seqs=1, max_model_len=60))
    schedule = PrefillSchedule(LIMITS, staging_share=0.2)
    assert schedule.limits.num_staging_blocks == 6
    with pytest.raises(ValueError, match="60 tokens; at most 59"):
        schedule.prefill([prompt(60)])
    with pytest.raises(ValueError, match="num_cached=8: must be from 0 to 7"):
        schedule.prefill([prompt(8, num_cached=8)])
    with pytest.raises(ValueError, match="8 blocks to stage, at most 6"):
        schedule.stage([make_work(30)])
    work = prompt(8)
    schedule.prefill([work])
    with pytest.raises(RuntimeError, match="ordered, but it is here already"):
        schedule.prefill([work])


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(15, 60),
    max_num_seqs=st.integers(1, 6),
    max_tokens=st.integers(1, 40),
    staging_share=st.floats(0, 1),
)
def test_everyone_gets_through_and_every_plan_fits(
    seed: int, num_blocks: int, max_num_seqs: int, max_tokens: int, staging_share: float
) -> None:
    rng = random.Random(seed)
    limits = InstanceLimits(
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        max_model_len=60,
    )
    schedule = PrefillSchedule(limits, staging_share)
    max_stage_tokens = BLOCK * min(int(staging_share * num_blocks), num_blocks - 15)
    pending: dict[RequestKey, int] = {}
    copying: dict[RequestKey, str] = {}
    aborted: set[RequestKey] = set()
    staged: set[RequestKey] = set()
    left = {"prompts": rng.randint(1, 15), "stages": rng.randint(0, 10) if max_stage_tokens else 0}
    done = 0
    expected = sum(left.values())
    for _ in range(10_000):
        if left["prompts"] and rng.random() < 0.3:
            left["prompts"] -= 1
            length = rng.randint(1, 59)
            work = prompt(length, num_cached=rng.choice([0, 0, rng.randint(0, length - 1)]))
            pending[work.request.key] = length - work.num_cached
            schedule.prefill([work])
        if left["stages"] and rng.random() < 0.3:
            left["stages"] -= 1
            schedule.stage([make_work(rng.randint(1, min(max_stage_tokens, 58)))])
        plan = schedule.plan(0.0)
        schedule.check()
        assert sum(count for _, count in plan.chunks) <= max_tokens
        assert len(plan.chunks) <= max_num_seqs
        assert schedule.stages.num_blocks <= staging_share * num_blocks
        copying |= dict.fromkeys(keys(plan.loads), "load") | dict.fromkeys(keys(plan.stages), "stage")
        for key, count in plan.chunks:
            assert key not in copying and key not in aborted
            pending[key] -= count
            schedule.prompts.computed(key, count)
            if pending[key] == 0:
                copying[key] = "save"
        if pending and rng.random() < 0.05:
            key = rng.choice(list(pending))
            if key not in aborted and (pending[key] or key in copying):
                aborted.add(key)
                if not schedule.abort(key):
                    done += 1
                elif key not in copying:
                    copying[key] = "save"
        for key in [key for key in copying if rng.random() < 0.4]:
            kind = copying.pop(key)
            if kind == "load":
                is_alive = schedule.prompts.loaded(key)
                assert is_alive == (key not in aborted)
                done += not is_alive
            elif kind == "stage":
                assert schedule.stages.staged(key)
                staged.add(key)
            else:
                schedule.prompts.saved(key)
                done += 1
        for key in [key for key in staged if rng.random() < 0.2]:
            staged.remove(key)
            schedule.stages.unstage(key)
            done += 1
        if done == expected:
            break
    assert done == expected
    schedule.check_idle()


def test_a_small_prompt_takes_no_block_that_a_waiting_candidate_is_short_of() -> None:
    schedule = PrefillSchedule(LIMITS, staging_share=0.4)
    large, other = prompt(57), prompt(40)
    schedule.prefill([large, other])
    schedule.plan(0.0)
    candidate, small = make_work(40), prompt(3)
    schedule.stage([candidate])
    schedule.prefill([small])
    assert schedule.memory.num_free == 5, "too few for the candidate, enough for the prompt"
    plan = schedule.plan(0.0)
    assert plan.stages == plan.new_prompts == []
    schedule.abort(large.request.key)
    schedule.prompts.saved(large.request.key)
    plan = schedule.plan(0.0)
    assert plan.stages == [candidate] and plan.new_prompts == [small]
