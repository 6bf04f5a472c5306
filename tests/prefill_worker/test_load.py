"""Many prompts at once make a plan longer, but each of them by as much."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.prefill_worker.schedule import PrefillSchedule
from alignedserve.protocol.messages import InstanceLimits, Request, Work
from alignedserve.sampling_params import SamplingParams
from alignedserve.timing.cost_presets import load_cost_model
from alignedserve.timing.deadlines import Deadlines
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestKey
from tests.calls import num_calls

COST = load_cost_model("opt-13b/a100-80gb")
LIMITS = InstanceLimits(
    num_blocks=8192, block_size=16, max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=2048
)


def with_prompts(count: int, is_rt: bool) -> PrefillSchedule:
    schedule = PrefillSchedule(LIMITS, 0.0, None, Estimate(COST))
    deadlines = Deadlines(is_rt=is_rt)
    for key in range(1, count + 1):
        request = Request(RequestKey(key), [5] * 8, SamplingParams(), 0, 0.0, tier="rt" if is_rt else "be")
        schedule.prefill([Work(request, [], 0, [], deadlines)])
    return schedule


@pytest.mark.parametrize("is_rt", [True, False])
def test_a_plan_takes_as_much_for_each_prompt_however_many_start(is_rt: bool) -> None:
    few, many = (num_calls(partial(with_prompts(count, is_rt).plan, 1.0)) for count in (32, 256))
    assert many <= 256 / 32 * few


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 2000)), min_size=1, max_size=40))
def test_chunks_one_by_one_take_what_they_take_together(chunks: list[tuple[int, int]]) -> None:
    costs = COST.chunks_together()
    for number, chunk in enumerate(chunks, 1):
        assert costs.seconds_with(*chunk) == pytest.approx(COST.iteration(chunks[:number], []), rel=1e-12)
        costs.add(*chunk)
