"""The rules of AccelGen, each on an example with costs that can be reckoned in the head."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from alignedserve.decode_worker.scheduled_request import ScheduledRequest, scheduled_request
from alignedserve.protocol.messages import Work
from alignedserve.scheduling.policies.accelgen import ALIKE_S
from alignedserve.scheduling.remaining_time import Pivot, RemainingTime
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestKey
from tests.scheduling.policies.instance import LIMITS, PLAIN, Instance, decoding, job, key, prompt

# 144 tokens take 154 ms, which is 0.95 of the rate of 512 in 522 ms.
PIVOT, PIVOT_S = 144, 0.154
# A prompt of 200 tokens is a long one.
SMALL = replace(LIMITS, max_num_batched_tokens=80)


# ---- remaining time --------------------------------------------------------------------------------------------------


def scheduled(work: Work) -> ScheduledRequest:
    return scheduled_request(work, None, 0, LIMITS.max_model_len)


def test_the_pivot_is_where_more_tokens_compute_hardly_faster() -> None:
    pivot = Pivot(LIMITS, Estimate(PLAIN))
    assert pivot.num_tokens == PIVOT and pivot.seconds == pytest.approx(PIVOT_S)


def test_a_prompt_may_wait_until_its_chunks_just_make_it() -> None:
    time, request = RemainingTime(LIMITS, Estimate(PLAIN)), scheduled(prompt(400, first_due_s=1.0))
    time.look([request], 0.0)
    assert time.of(request, 0.0) == pytest.approx(1.0 - 3 * PIVOT_S)
    assert time.of(request, 0.5) == pytest.approx(0.5 - 3 * PIVOT_S)
    # An iteration took longer: it counts as what each of them may take.
    time.took(0.2)
    assert time.of(request, 0.0) == pytest.approx(1.0 - 3 * 0.2)


def test_a_decode_may_wait_since_its_last_token() -> None:
    time, request = RemainingTime(LIMITS, Estimate(PLAIN)), scheduled(decoding(tbt_s=0.5))
    time.look([request], 3.0)
    assert time.of(request, 3.1) == pytest.approx(0.4 - PIVOT_S)
    request.num_cached, request.num_tokens = 21, 22
    time.look([request], 3.2)
    assert time.of(request, 3.2) == pytest.approx(0.5 - PIVOT_S)


@pytest.mark.parametrize("late_s", [0.2, -0.3])
def test_a_window_is_spread_evenly_and_what_was_waited_too_long_is_missing_next(late_s: float) -> None:
    """Ten tokens in ten seconds."""
    time, request = RemainingTime(LIMITS, Estimate(PLAIN)), scheduled(job(due_s=10.0, max_tokens=11))
    time.look([request], 0.0)
    assert request.num_left == 10 and time.of(request, 0.0) == pytest.approx(1.0 - PIVOT_S)
    request.num_cached, request.num_tokens = 21, 22
    time.look([request], 1.0 + late_s)
    assert time.of(request, 1.0 + late_s) == pytest.approx(1.0 - PIVOT_S - late_s)


def test_who_has_no_objective_goes_last() -> None:
    time = RemainingTime(LIMITS, Estimate(PLAIN))
    works = [job(), decoding(0.5), prompt(20, first_due_s=0.3), job(due_s=2.0, max_tokens=3)]
    requests = [scheduled(each) for each in works]
    time.look(requests, 0.0)
    assert time.in_order(requests, 0.0) == [requests[2], requests[1], requests[3], requests[0]]


# ---- the budget ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tbt_s", "num_tokens"),
    [
        # 10 ms, 1 ms for the decode, and two blocks; a third one would make it 59 ms
        (0.05, 32),
        # likewise 18 of them, which is more than the pivot
        (0.3, 288),
    ],
)
def test_a_prompt_is_cut_where_the_tightest_objective_ends(tbt_s: float, num_tokens: int) -> None:
    instance = Instance("accelgen")
    instance.runs(first := decoding(tbt_s), decoding(2.0))
    instance.iterate()
    instance.schedule.abort(RequestKey(key(first) + 1))
    instance.waits(long := prompt(400))
    plan = instance.iterate()
    assert plan.run == [key(first)] and plan.chunks == [(key(long), num_tokens)]


def test_later_chunks_are_shorter_since_they_read_those_before() -> None:
    """Attention of c tokens after b others takes 1 us * (2bc + c^2) beside 10 ms, 1 ms for the decode, and 1 ms for
    each token of the chunk: 112 tokens take 136 ms after none and 161 ms after 112, where 96 take 138 ms."""
    instance = Instance("accelgen", cost=replace(PLAIN, prefill_attention_s=1e-6))
    instance.runs(decoding(0.14))
    instance.waits(long := prompt(400))
    assert [instance.iterate().chunks for _ in range(2)] == [[(key(long), 112)], [(key(long), 96)]]


def test_an_objective_that_is_lost_bounds_no_iteration() -> None:
    instance = Instance("accelgen")
    instance.runs(decoding(0.05))
    instance.waits(long := prompt(600))
    assert instance.iterate(now=0.2).chunks == [(key(long), LIMITS.max_num_batched_tokens - 1)]


def test_another_long_prompt_begins_when_the_first_is_computed() -> None:
    instance = Instance("accelgen", SMALL)
    instance.waits(first := prompt(200), second := prompt(200))
    assert [instance.iterate().chunks for _ in range(2)] == [[(key(first), 80)]] * 2
    plan = instance.iterate()
    assert plan.run == [key(first)] and plan.chunks == [(key(second), 80 - 40)]


def test_a_short_prompt_begins_beside_a_long_one_that_is_cut() -> None:
    """A chunk has 64 tokens at most, however many more are left of the iteration's."""
    instance = Instance("accelgen", replace(LIMITS, max_prefill_chunk=64))
    instance.waits(first := prompt(200), second := prompt(200, 99.9), short := prompt(10))
    plan = instance.iterate()
    begun = [key(first), key(second)]
    assert plan.run == [key(short)] and len(plan.chunks) == 1 and plan.chunks[0][0] in begun


# ---- who is in the batch ---------------------------------------------------------------------------------------------


def test_who_has_slack_sits_out_and_keeps_its_kv() -> None:
    instance = Instance("accelgen")
    instance.runs(tight := decoding(0.03), *(decoding(1.0) for _ in range(30)))
    num_free = instance.schedule.blocks.num_free
    # 10 ms and 20 decodes
    plan = instance.iterate()
    assert len(plan.run) == 20 and plan.run[0] == key(tight)
    assert not plan.wants_evicted and instance.schedule.blocks.num_free == num_free


def test_an_urgent_prompt_displaces_decodes_that_can_wait() -> None:
    instance = Instance("accelgen")
    instance.runs(tight := decoding(0.03), *(job() for _ in range(30)))
    instance.waits(urgent := prompt(10, first_due_s=0.1))
    plan = instance.iterate()
    assert plan.run[0] == key(tight) and plan.run[-1] == key(urgent) and len(plan.run) == 11


def test_an_urgent_prompt_without_room_has_whoever_can_wait_longest_leave() -> None:
    instance = Instance("accelgen", replace(LIMITS, num_blocks=10, max_model_len=160))
    works = [job(due_s=100.0), job(), job(due_s=50.0), decoding(0.5)]
    instance.runs(*works)
    instance.waits(prompt(60, first_due_s=0.1))
    assert instance.iterate().wants_evicted == [key(works[1])]


def test_who_came_urgent_stays_until_its_next_token() -> None:
    """That it has time again, since more of its prefix was found or iterations got shorter, makes it leave for no other
    one. They would take turns, and neither ever get on."""
    limits = replace(LIMITS, num_blocks=10, max_num_batched_tokens=64, max_model_len=160)
    instance = Instance("accelgen", limits, preemption_mode="recompute")
    instance.schedule.took(0.5)
    instance.waits(first := prompt(100, first_due_s=1.0))
    assert [key(work) for work in instance.iterate().new_prompts] == [key(first)]
    for _ in range(64):
        instance.schedule.took(0.01)
    instance.waits(prompt(100, first_due_s=0.0))
    plan = instance.iterate()
    assert plan.run == [key(first)] and not plan.drops
    assert instance.iterate().drops == [key(first)]


def test_a_prompt_that_can_wait_makes_nobody_leave() -> None:
    instance = Instance("accelgen", replace(LIMITS, num_blocks=10, max_model_len=160))
    instance.runs(job(), job(), job(), job())
    instance.waits(prompt(60))
    plan = instance.iterate()
    assert not plan.wants_evicted and not plan.new_prompts


def test_of_prompts_that_may_wait_alike_the_one_that_fits_best_begins() -> None:
    instance = Instance("accelgen")
    instance.waits(small := prompt(40), large := prompt(70, 100.0 + ALIKE_S / 2))
    assert [key(work) for work in instance.iterate().new_prompts] == [key(large), key(small)]


def test_of_prompts_that_may_not_wait_alike_the_first_begins() -> None:
    instance = Instance("accelgen")
    instance.waits(large := prompt(70, 100.0 + 2 * ALIKE_S), small := prompt(40))
    assert [key(work) for work in instance.iterate().new_prompts] == [key(small), key(large)]


def test_a_decode_sits_out_for_no_prompt_that_finds_no_room() -> None:
    """Beside 80 tokens of the prompt it would come late. Without an iteration nothing ever frees the room."""
    instance = Instance("accelgen", replace(LIMITS, num_blocks=12, max_model_len=160))
    instance.runs(running := decoding(tbt_s=0.05, num_tokens=100))
    for _ in range(64):
        instance.schedule.took(0.011)
    instance.waits(prompt(100, first_due_s=0.0))
    assert instance.iterate(now=0.0).run == [key(running)]
