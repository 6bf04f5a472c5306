"""The rules of Apt-Serve, each on an example that can be checked by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.scheduling.policies.instance import LIMITS, Instance, decoding, document, job, key, keys, prompt

both = pytest.mark.parametrize("policy", ["apt", "apt-s"])


def test_an_iteration_has_prompts_or_decodes_whichever_have_waited_longer_together() -> None:
    instance = Instance("apt", replace(LIMITS, max_num_batched_tokens=64))
    instance.runs(*(running := [job(), job()]))
    instance.waits(first := document(60))
    assert instance.iterate(now=0.0).run == keys(*running)
    # They have just got a token each.
    instance.waits(second := document(60))
    assert instance.iterate(now=0.05).run == keys(first)
    # The two have waited 0.05 s each since, and the second prompt as long.
    assert set(instance.iterate(now=0.1).run) == {*keys(*running, first)}
    assert instance.iterate(now=0.15).run == keys(second)


def test_apt_s_computes_prompts_beside_decodes_as_far_as_these_have_time() -> None:
    """Of 60 ms an iteration takes 10 and the decode 1: three blocks of a prompt are left."""
    instance = Instance("apt-s")
    instance.runs(tight := decoding(0.06))
    instance.waits(long := document(200))
    for num_tokens in (48, 48, 48, 48):
        plan = instance.iterate()
        assert plan.run == keys(tight) and plan.chunks == [(key(long), num_tokens)]
    assert instance.iterate().run == keys(tight, long)


def test_apt_s_computes_what_has_begun_before_others_begin() -> None:
    instance = Instance("apt-s", replace(LIMITS, max_num_batched_tokens=64))
    instance.waits(long := document(100))
    instance.iterate(now=0.0)
    instance.waits(short := document(20))
    plan = instance.iterate(now=0.1)
    assert plan.run == keys(long, short)


@both
def test_who_needs_little_memory_for_what_it_waited_begins_first(policy: str) -> None:
    instance = Instance(policy)
    instance.waits(large := document(120), small := document(40))
    assert [key(work) for work in instance.iterate().new_prompts] == keys(small, large)


@both
def test_who_is_late_goes_last(policy: str) -> None:
    instance = Instance(policy, replace(LIMITS, num_blocks=10, max_model_len=160))
    instance.runs(blocker := job(num_tokens=100))
    instance.waits(prompt(100, first_due_s=1.0), early := prompt(100, first_due_s=9.0))
    assert not instance.iterate().new_prompts
    instance.schedule.abort(key(blocker))
    assert [key(work) for work in instance.iterate(now=2.0).new_prompts] == keys(early)


def test_one_that_is_worth_more_than_all_that_fit_begins_instead() -> None:
    """It needs all blocks, and has waited for ten times as long as the small one, which is worth more per block."""
    instance = Instance("apt", replace(LIMITS, num_blocks=11, max_model_len=160))
    instance.runs(blocker := job(num_tokens=150))
    instance.waits(large := document(150))
    instance.iterate(now=0.0)
    instance.waits(document(10))
    instance.iterate(now=9.0)
    instance.schedule.abort(key(blocker))
    plan = instance.iterate(now=10.0)
    assert [key(work) for work in plan.new_prompts] == keys(large)


@both
def test_decodes_that_are_worth_least_for_their_blocks_leave(policy: str) -> None:
    """Together they have all ten blocks, and each needs one more."""
    instance = Instance(policy, replace(LIMITS, num_blocks=10, max_model_len=160))
    instance.runs(large := decoding(100.0, 95), decoding(100.0, 63))
    instance.iterate(now=0.5)
    assert instance.iterate(now=1.0).wants_evicted == keys(large)
