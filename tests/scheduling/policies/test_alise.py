"""The rules of ALISE, each on an example with costs that can be reckoned in the head."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from alignedserve.decode_worker.scheduled_request import ScheduledRequest, scheduled_request
from alignedserve.protocol.messages import Work
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.alise import AGE_S, FIRST_QUEUE_S, AliseDecode
from alignedserve.timing.cost import LinearCost
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestKey
from tests.scheduling.policies.instance import LIMITS, PLAIN, Instance, key, keys
from tests.works import make_work

# A token takes 11 ms: 10 and 1 for the request.
TOKEN_S = 0.011
SMALL = replace(LIMITS, num_blocks=10, max_model_len=160)


def part() -> AliseDecode:
    return AliseDecode(LIMITS, SchedulingConfig("alise"), Estimate(PLAIN))


def foretold(length: int, num_tokens: int = 20, num_output: int = 1, num_cached: int | None = None) -> Work:
    return make_work(num_tokens, num_output, num_cached, predicted_len=length)


def looked_at(policy: AliseDecode, *works: Work, now: float = 0.0) -> list[ScheduledRequest]:
    """They run already."""
    requests = [scheduled_request(work, None, 0, LIMITS.max_model_len) for work in works]
    policy._in_order(requests, now)
    return requests


def test_what_a_request_takes_is_its_prompt_and_its_tokens() -> None:
    policy = part()
    decoding, prompt = looked_at(policy, foretold(101), foretold(100, num_output=0, num_cached=0))
    assert policy._predictor.remaining_s(decoding) == pytest.approx(100 * TOKEN_S)
    assert policy._predictor.remaining_s(prompt) == pytest.approx(0.03 + 100 * TOKEN_S)


def test_each_queue_is_for_twice_the_time() -> None:
    policy = part()
    numbers = [round(FIRST_QUEUE_S * 2**queue / TOKEN_S) for queue in (0, 1, 2, 3)]
    requests = looked_at(policy, *(foretold(number) for number in numbers))
    assert [policy.queue_of(request, 0.0) for request in requests] == [0, 1, 2, 3]


def test_who_has_not_run_for_long_rises() -> None:
    policy = part()
    (request,) = looked_at(policy, foretold(300))
    queues = [policy.queue_of(request, seconds * AGE_S) for seconds in (0.0, 0.9, 1.0, 2.0, 99.0)]
    assert queues == [3, 3, 2, 1, 0]
    request.last_run = 7
    policy._in_order([request], 2 * AGE_S)
    assert policy.queue_of(request, 2 * AGE_S) == 3


def test_who_exceeds_its_prediction_falls_and_is_expected_to_take_twice_as_long() -> None:
    policy = part()
    (request,) = looked_at(policy, foretold(40))
    assert policy.queue_of(request, 0.0) == 0
    request.num_tokens, request.num_cached = 60, 59
    policy._in_order([request], 0.0)
    # Of 80 tokens 40 are left, which is half a queue, and it fell by one.
    assert request.num_left == 40 and policy.queue_of(request, 0.0) == 1


def test_the_estimated_waiting_time_is_of_those_before_or_until_it_rises() -> None:
    policy = part()
    requests = looked_at(policy, foretold(21), foretold(201), foretold(401), foretold(500))
    wanted = [0.0, 20 * TOKEN_S, 220 * TOKEN_S, AGE_S]
    assert policy.waiting_times(requests, 0.0) == pytest.approx(wanted)


def test_a_shorter_one_has_a_longer_one_leave_and_not_the_other_way() -> None:
    for waits, leaves in ((foretold(10, 60), True), (foretold(500, 60), False)):
        instance = Instance("alise", SMALL)
        instance.runs(short := foretold(20, 60), long := foretold(100, 60))
        instance.waits(waits)
        plan = instance.iterate()
        assert plan.wants_evicted == (keys(long) if leaves else [])
        assert key(short) in plan.run


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_within_a_queue_the_longest_leaves_for_a_shorter_one(mode: str) -> None:
    instance = Instance("alise", SMALL, preemption_mode=mode)
    instance.runs(long := foretold(44, 60), foretold(43, 60))
    instance.waits(foretold(44, 60))
    plan = instance.iterate()
    assert not (plan.wants_evicted or plan.drops)
    instance.waits(foretold(20, 60))
    plan = instance.iterate()
    assert [*plan.wants_evicted, *plan.drops] == keys(long)


def test_nobody_leaves_before_a_token_for_one_of_its_own_queue() -> None:
    instance = Instance("alise", replace(SMALL, max_num_batched_tokens=64))
    instance.waits(long := foretold(40, 100, 0, 0))
    assert not instance.iterate().run
    instance.waits(foretold(20, 80))
    plan = instance.iterate()
    assert plan.run == keys(long) and not plan.wants_evicted
    assert instance.iterate().wants_evicted == keys(long)


def test_while_a_shorter_one_waits_blocks_are_kept_free_for_the_next() -> None:
    """It needs four of the five that are free, and of forty two are kept."""
    for mode, leaves in (("swap", True), ("recompute", False)):
        instance = Instance("alise", replace(LIMITS, num_blocks=40), preemption_mode=mode)
        instance.runs(foretold(20, 300), long := foretold(500, 250))
        assert instance.schedule.blocks.num_free == 5
        assert not instance.iterate().wants_evicted
        instance.waits(foretold(10, 60))
        plan = instance.iterate()
        assert (plan.wants_evicted, plan.drops) == (keys(long) if leaves else [], [])


@pytest.mark.parametrize(("mode", "leaves"), [("swap", True), ("recompute", False), ("defer", False)])
def test_who_has_only_risen_has_others_leave_with_their_kv_alone(mode: str, leaves: bool) -> None:
    """After two rises one of the fourth queue is before one of the third, which has just run."""
    instance = Instance("alise", SMALL, preemption_mode=mode)
    instance.runs(running := foretold(150, 100))
    instance.waits(foretold(300, 100))
    instance.iterate(0.0)
    instance.iterate(2 * AGE_S)
    plan = instance.iterate(2 * AGE_S)
    assert plan.wants_evicted == (keys(running) if leaves else [])
    assert not plan.drops


def test_nobody_leaves_before_a_token_for_one_that_has_only_risen() -> None:
    """If the pool had no room its KV would be computed again: they would take turns, and neither ever get a token."""
    instance = Instance("alise", replace(SMALL, max_num_batched_tokens=64))
    instance.waits(running := foretold(150, 100, 0, 0), foretold(300, 100, 0, 0))
    assert not instance.iterate(0.0).run
    plan = instance.iterate(2 * AGE_S)
    assert plan.run == keys(running) and not plan.wants_evicted
    assert instance.iterate(2 * AGE_S).wants_evicted == keys(running)


def test_who_leaves_without_its_kv_leaves_its_blocks_to_the_shorter_one_at_once() -> None:
    instance = Instance("alise", SMALL, preemption_mode="recompute")
    instance.runs(short := foretold(20, 60), long := foretold(100, 60))
    instance.waits(shorter := foretold(10, 60))
    plan = instance.iterate()
    assert plan.drops == keys(long) and plan.pulls == [shorter] and plan.run == keys(short)


def test_the_shortest_prompt_begins_first() -> None:
    instance = Instance("alise", replace(LIMITS, max_num_batched_tokens=64))
    prompts = [foretold(length, 60, num_output=0, num_cached=0) for length in (500, 100, 20)]
    instance.waits(*prompts)
    assert instance.iterate().new_prompts[0] is prompts[2]


def test_a_prompt_that_is_begun_goes_on_behind_one_that_finds_no_room() -> None:
    instance = Instance("alise", replace(SMALL, max_num_batched_tokens=64))
    instance.waits(begun := foretold(40, 100, num_output=0, num_cached=0))
    assert instance.iterate().chunks == [(key(begun), 64)]
    instance.waits(foretold(30, 100))
    assert instance.iterate().run == keys(begun)


def test_within_a_queue_nobody_leaves_who_gains_less_than_copies_take() -> None:
    """The pool has all but its last token: that one goes, and 61 come back, in the time of six tokens."""
    for length, leaves in ((40, False), (30, True)):
        instance = Instance("alise", SMALL)
        instance.runs(long := foretold(44, 60), foretold(20, 60))
        instance.iterate()
        instance.waits(foretold(length, 60))
        assert instance.iterate().wants_evicted == (keys(long) if leaves else [])


def test_one_that_may_not_leave_does_not_keep_others_from_leaving() -> None:
    """The longest has no token yet, and is of the same queue."""
    instance = Instance("alise", replace(SMALL, max_num_batched_tokens=64))
    instance.runs(leaves := foretold(33, 40))
    instance.waits(foretold(34, 70, 0, 0))
    assert instance.iterate().run == keys(leaves)
    instance.waits(foretold(10, 60))
    assert instance.iterate().wants_evicted == keys(leaves)


def test_a_long_one_ends_beside_a_stream_of_shorter_ones() -> None:
    """A token takes 0.1 s. After two rises it is before them in their queue, and stays for the two seconds that this
    queue's longest take: it has its forty tokens in a few visits, and moves no more often."""
    instance = Instance(
        "alise", SMALL, replace(PLAIN, prefill_fixed_s=0.1, decode_lines=[LinearCost(0.1, 0.0)])
    )
    schedule, num_left, num_visits = instance.schedule, dict[RequestKey, int](), 0

    def comes(length: int, num_output: int = 1, number: int | None = None) -> RequestKey:
        work = make_work(60, num_output, predicted_len=length, key=number)
        instance.waits(work)
        num_left[key(work)] = length - num_output
        return key(work)

    long = comes(41)
    for turn in range(1000):
        while len(schedule.candidates) < 3:
            comes(13)
        plan = instance.iterate(0.1 * turn)
        for pull in plan.pulls:
            assert schedule.blocks.pulled(key(pull))
            num_visits += key(pull) == long
        for each in plan.run:
            num_left[each] -= 1
            if not num_left[each]:
                schedule.blocks.ended(each)
        if not num_left[long]:
            break
        for each in plan.wants_evicted:
            if schedule.blocks.evict(each):
                assert schedule.blocks.evicted(each)
                length = 41 if each == long else 13
                comes(length, length - num_left[each], each)
    assert not num_left[long] and num_visits <= 4
