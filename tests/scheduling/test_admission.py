"""How many blocks admission leaves free: by vLLM's rule."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.timing.deadlines import Deadlines
from tests.scheduling.policies.instance import LIMITS, Instance, document, job, key
from tests.works import make_work


def test_admission_looks_no_less_far_ahead_than_eviction() -> None:
    with pytest.raises(ValueError, match="admit_ahead=3: must be at least 4"):
        SchedulingConfig(admit_ahead=3)
    assert SchedulingConfig(admit_ahead=4) and SchedulingConfig(admit_ahead=1, evict_ahead=1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("evict_ahead", [1, 4])
@pytest.mark.parametrize("policy", ["aligned", "fcfs", "sarathi"])
def test_nobody_is_admitted_and_evicted_at_the_next_boundary(
    policy: str, evict_ahead: int, seed: int
) -> None:
    """One per cent of 30 blocks is none: it is what victims look ahead for that keeps them."""
    limits = replace(LIMITS, num_blocks=30, max_model_len=480)
    instance = Instance(policy, limits, evict_ahead=evict_ahead, admit_ahead=None)
    dice = Random(seed)
    instance.waits(*(document(dice.randint(10, 90)) for _ in range(60)))
    came: set[int] = set()
    num_evicted = 0
    for _ in range(150):
        plan = instance.iterate()
        assert not came & {*plan.wants_evicted}
        for each in plan.wants_evicted:
            assert instance.schedule.blocks.evict(each) and instance.schedule.blocks.evicted(each)
        num_evicted += len(plan.wants_evicted)
        came = {key(work) for work in plan.new_prompts}
    assert num_evicted


@pytest.mark.parametrize(("num_blocks", "num_begun"), [(199, 1), (200, 0)])
def test_beside_others_one_per_cent_of_the_blocks_stays_free(num_blocks: int, num_begun: int) -> None:
    """One block is free beside those of the one that runs and of the prompt: with 199 that is enough."""
    limits = replace(LIMITS, num_blocks=num_blocks, max_num_batched_tokens=4096, max_model_len=3180)
    instance = Instance("fcfs", limits, admit_ahead=None)
    instance.runs(job(num_tokens=20))
    instance.waits(document(16 * (num_blocks - 3) - 4))
    assert len(instance.iterate().new_prompts) == num_begun


def test_one_that_comes_alone_may_take_all_blocks() -> None:
    limits = replace(LIMITS, num_blocks=196, max_num_batched_tokens=4096, max_model_len=196 * 16)
    instance = Instance("fcfs", limits, admit_ahead=None)
    instance.waits(long := document(3130))
    assert instance.iterate().new_prompts == [long]


@pytest.mark.parametrize("policy", ["accelgen", "alise"])
def test_one_for_which_others_leave_begins_when_they_have_left(policy: str) -> None:
    """Of 200 blocks 180 are taken, and those that run will need twelve more: to the one that needs ten of the twenty
    that are free, six are left."""
    instance = Instance(policy, evict_ahead=4, admit_ahead=None)
    running = [make_work(236, predicted_len=400) for _ in range(12)]
    instance.runs(*running)
    assert instance.schedule.blocks.num_free == 20
    deadlines = Deadlines(is_rt=True, first_due_s=0.2, tbt_s=100.0)
    instance.waits(urgent := make_work(150, 0, 0, deadlines=deadlines, predicted_len=5))
    plan = instance.schedule.plan(0.0)
    assert len(plan.wants_evicted) == 1 and not plan.new_prompts
    (leaves,) = plan.wants_evicted
    assert instance.schedule.blocks.evict(leaves)
    plan = instance.schedule.plan(0.0)
    assert not (plan.wants_evicted or plan.new_prompts), "its blocks are under a copy"
    assert instance.schedule.blocks.evicted(leaves)
    plan = instance.schedule.plan(0.0)
    assert plan.new_prompts == [urgent] and not plan.wants_evicted
