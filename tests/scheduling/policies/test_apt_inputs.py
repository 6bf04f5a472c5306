"""The rules of Apt-Serve's hybrid cache, each on an example that can be checked by hand.

Restoring K and V of a token takes a sixth of a millisecond. A prompt of 100 tokens takes seven blocks of KV, or four of
inputs; with N requests here, its inputs cost N * 16.7 ms.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.decode_worker.plan import DecodePlan
from alignedserve.kv.held import Held
from alignedserve.kv.layout import INPUTS
from alignedserve.protocol.messages import Work
from alignedserve.scheduling.chunk_budget import tokens_beside
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import make_policy
from alignedserve.timing.deadlines import Deadlines
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestKey
from tests.scheduling.policies.instance import LIMITS, PLAIN, Instance, document, job, key, keys, prompt


def limits(num_blocks: int, policy: str = "apt", max_restored_blocks: int = 99, **more: int) -> Instance:
    max_model_len = num_blocks * 16
    return Instance(
        policy,
        replace(
            LIMITS,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_restored_blocks=max_restored_blocks,
            **more,
        ),
    )


def begun(plan: DecodePlan) -> list[RequestKey]:
    return [key(work) for work in plan.new_prompts]


def after_waiting(instance: Instance, *works: Work, until: float) -> DecodePlan:
    """They come at 0, when all blocks are another's; that one has ended when they may begin."""
    instance.runs(blocker := job(num_tokens=instance.schedule.limits.num_blocks * 16 - 2))
    instance.waits(*works)
    assert not instance.iterate(now=0.0).new_prompts
    instance.schedule.abort(key(blocker))
    return instance.iterate(now=until)


def with_inputs(instance: Instance, plan: DecodePlan) -> list[RequestKey]:
    return [key for key in begun(plan) if instance.schedule.blocks[key].layout is INPUTS]


def test_two_begin_with_inputs_where_one_would_with_kv() -> None:
    """Each has waited for 10 s: (10 - 0.033) / 3.5 blocks, then 10 / 7 blocks. Of ten blocks two are left."""
    instance = limits(10)
    plan = after_waiting(instance, first := document(100), second := document(100), until=10.0)
    assert begun(plan) == keys(first, second)
    assert with_inputs(instance, plan) == keys(first, second)
    assert instance.schedule.blocks.num_free == 2


def test_the_second_half_of_the_memory_is_given_where_it_is_free() -> None:
    plan = after_waiting(instance := limits(14), first := document(100), second := document(100), until=10.0)
    assert begun(plan) == keys(first, second) and not with_inputs(instance, plan)


def test_one_half_of_the_memory_more_makes_kv_of_one() -> None:
    """Both second halves gain 0.033 s, and three of the eleven blocks are left for one of them."""
    plan = after_waiting(instance := limits(11), first := document(100), second := document(100), until=10.0)
    assert begun(plan) == keys(first, second) and with_inputs(instance, plan) == keys(second)


def test_inputs_that_cost_all_others_more_than_they_gain_are_not_kept() -> None:
    """After 0.06 s, 2 * (0.06 - 0.033) is less than 0.06."""
    plan = after_waiting(instance := limits(10), first := document(100), document(100), until=0.06)
    assert begun(plan) == keys(first) and not with_inputs(instance, plan)
    plan = after_waiting(instance := limits(10), document(100), document(100), until=0.08)
    assert len(with_inputs(instance, plan)) == 2


def test_who_is_late_has_kv() -> None:
    plan = after_waiting(instance := limits(10), late := prompt(100, first_due_s=1.0), until=10.0)
    assert begun(plan) == keys(late) and not with_inputs(instance, plan)
    plan = after_waiting(instance := limits(6), late := prompt(90, first_due_s=1.0), until=10.0)
    assert begun(plan) == keys(late) and not with_inputs(instance, plan)


def test_who_fits_only_with_inputs_does_not_begin_when_it_is_late() -> None:
    for first_due_s, num_begun in ((1.0, 0), (20.0, 1)):
        instance = limits(11)
        instance.runs(blocker := job(num_tokens=60), job(num_tokens=100))
        instance.waits(prompt(100, first_due_s))
        instance.iterate(now=0.0)
        instance.schedule.abort(key(blocker))
        plan = instance.iterate(now=10.0)
        assert (len(plan.new_prompts), len(with_inputs(instance, plan))) == (num_begun, num_begun)


def _beside_kv() -> tuple[Instance, Work, Work]:
    """One request has KV, seven blocks, and another one inputs, four; no block is free."""
    instance = limits(11)
    with_inputs, with_kv = after_waiting_for_both(instance)
    return instance, with_inputs, with_kv


def after_waiting_for_both(instance: Instance) -> tuple[Work, Work]:
    plan = after_waiting(instance, first := document(100), second := document(100), until=10.0)
    assert with_inputs(instance, plan) == keys(second)
    return second, first


def test_who_has_inputs_waits_with_its_blocks_until_running_it_is_worth_it() -> None:
    instance, with_inputs, with_kv = _beside_kv()
    # Its last token is seen now.
    assert instance.iterate(now=10.01).run == keys(with_kv)
    # 0.03 s are less than the 2 * 101 / 6 ms that restoring takes, and 0.04 s are more.
    assert instance.iterate(now=10.04).run == keys(with_kv)
    assert set(instance.iterate(now=10.05).run) == {*keys(with_kv, with_inputs)}


def test_who_would_not_begin_with_inputs_is_computed_again_when_there_is_room() -> None:
    instance, with_inputs, with_kv = _beside_kv()
    assert not instance.iterate(now=10.01).drops
    instance.schedule.abort(key(with_kv))
    plan = instance.iterate(now=10.02)
    assert plan.drops == keys(with_inputs)
    assert instance.schedule.blocks.num_free == 11


def test_inputs_are_dropped_when_blocks_run_out() -> None:
    """Nothing of them can go to the pool: three requests have 128 tokens of inputs each, in all blocks, and one leaves.
    They run although they have just got a token, since nobody else does."""
    instance = limits(12)
    plan = after_waiting(instance, *(all_three := [document(127), document(127), document(127)]), until=10.0)
    assert with_inputs(instance, plan) == keys(*all_three) and instance.schedule.blocks.num_free == 0
    assert len(instance.iterate(now=10.1).run) == 3
    plan = instance.iterate(now=10.2)
    assert len(plan.drops) == 1 and not plan.wants_evicted
    assert len(plan.run) == 2


def test_under_apt_s_a_begun_prompt_with_inputs_goes_on_beside_decodes_with_inputs() -> None:
    """A decode restores eight blocks, which is all that an iteration may: prompts go first."""
    instance = limits(12, "apt-s", max_restored_blocks=8, max_num_batched_tokens=64)
    works = [document(120), document(120), document(120)]
    plans = [after_waiting(instance, *works, until=10.0)]
    plans += [instance.iterate(now=10.0 + 0.1 * number) for number in range(1, 10)]
    assert {each for plan in plans for each in with_inputs(instance, plan)} == {*keys(*works)}
    assert {each for plan in plans for each in plan.run} == {*keys(*works)}


def test_without_hidden_cache_all_have_kv() -> None:
    instance = Instance("apt", replace(LIMITS, num_blocks=10, max_model_len=160))
    plan = after_waiting(instance, first := document(100), document(100), until=10.0)
    assert begun(plan) == keys(first) and not with_inputs(instance, plan)


def test_all_that_run_or_may_begin_wait_for_what_is_restored() -> None:
    part = make_policy(SchedulingConfig("apt")).colocated(
        limits(10).schedule.limits, estimate := Estimate(PLAIN)
    )
    at = SimpleNamespace(requests=["waits"], batch=["may be", "pulled"], running=["runs"])
    assert part._loss_of_a_token_s(at) == 4 * estimate.restored_token_s > 0  # type: ignore[attr-defined]


def test_under_apt_s_what_restoring_takes_is_no_time_for_prompts() -> None:
    part = make_policy(SchedulingConfig("apt-s")).colocated(
        limits(10).schedule.limits, estimate := Estimate(PLAIN)
    )
    here = [SimpleNamespace(layout=layout, num_cached=300) for layout in (INPUTS, Held().layout)]
    restoring_s = part._restoring_s(here)  # type: ignore[attr-defined]
    assert restoring_s == pytest.approx(0.05)
    tight = SimpleNamespace(deadlines=Deadlines(is_rt=True, tbt_s=0.1))
    at: Any = SimpleNamespace(running=[tight], limits=LIMITS, num_tokens_left=512)
    # 11 ms are the decode's; blocks have 16 tokens.
    assert tokens_beside(at, estimate, [20]) == 80
    assert tokens_beside(at, estimate, [20], restoring_s) == 32
