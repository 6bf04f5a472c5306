"""How much of a prompt is computed beside streams, under `aligned`."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Work
from alignedserve.timing.deadlines import DEMOTION_S, Deadlines
from tests.scheduling.policies.instance import LIMITS, Instance, job, key, keys, prompt
from tests.works import make_work

# Of the time that an iteration may take, so much is planned with.
SAFETY = 0.9


def stream(tbt_s: float, slack_s: float, hurries: bool = False) -> Work:
    """Its second token is due at `slack_s`."""
    deadlines = Deadlines(True, slack_s - tbt_s, tbt_s, hurries=hurries)
    return make_work(20, deadlines=deadlines)


def num_computed(*streams: Work) -> int:
    """Of a prompt that waits beside these."""
    instance = Instance("aligned")
    instance.runs(*streams, now=-1.0)
    instance.waits(prompt(600))
    plan = instance.iterate(0.0)
    assert len(plan.run) >= len(streams)
    return sum(count for _, count in plan.chunks)


@pytest.mark.parametrize(
    ("tbt_s", "slack_s", "seconds"),
    [
        # an iteration takes 11 ms without the prompt
        (0.1, 0.1, 0.1),
        # ahead: it waits for longer than for one token
        (0.1, 0.4, 0.4),
        # late, or late in any case: it has what it asked for
        (0.1, -0.05, 0.1),
        (0.1, 0.005, 0.1),
    ],
)
def test_a_prompt_has_the_time_that_a_stream_can_wait(tbt_s: float, slack_s: float, seconds: float) -> None:
    count = num_computed(stream(tbt_s, slack_s))
    # chunks end on block boundaries; of real time there is at least one
    most = SAFETY * seconds - 0.011
    assert count == max(int(1000 * most + 1e-6) // 16 * 16, 16)


def test_a_stream_that_asked_for_what_cannot_be_had_holds_up_no_prompt() -> None:
    """An iteration takes 11 ms for one stream, and 21 ms for eleven."""
    assert num_computed(stream(0.001, -0.005)) == 511
    assert num_computed(*(stream(0.02, 0.0) for _ in range(11))) == 512 - 11
    assert num_computed(stream(0.02, 0.0)) == 16, "a block at least"


def test_a_stream_that_is_lost_holds_up_no_prompt() -> None:
    assert num_computed(stream(0.01, -1.0)) == 511, "all tokens of an iteration"
    assert num_computed(stream(0.01, -1.0), stream(0.1, 0.1)) == num_computed(stream(0.1, 0.1)) == 64


def test_of_prompts_who_is_due_first_goes_first_and_who_is_late_behind_those_due_soon() -> None:
    late, soon, later = prompt(600, first_due_s=-0.1), prompt(600, 1.0), prompt(600, DEMOTION_S)
    instance = Instance("aligned")
    instance.waits(late, soon, later)
    first = instance.iterate(-1.0)
    assert [each for each, _ in first.chunks] == [key(late)]
    assert [each for each, _ in instance.iterate(0.0).chunks] == [key(soon)]
    ended = [each for _ in range(4) for each in instance.iterate(0.0).run]
    assert [each for each in dict.fromkeys(ended) if each != key(soon)][:1] == [key(late)]


def test_lost_streams_that_hurry_do_not_hold_best_effort_back() -> None:
    def num_be(slack_s: float) -> int:
        instance = Instance("aligned")
        instance.runs(stream(0.1, slack_s, hurries=True), *(job() for _ in range(20)))
        return len(instance.iterate(0.0).run) - 1

    assert num_be(0.1) < 5
    assert num_be(-3.0) == 20


# ---- real time that leaves for real time ----------------------------------------------------------------------------

# Room for two streams of 174 tokens, and for a prompt of 80 beside one of them.
SMALL = replace(LIMITS, num_blocks=24, max_model_len=320)
# An iteration with two streams takes 12 ms. Saving and loading 174 tokens takes 0.35 s, which is 29 iterations.
ITERATION_S, NUM_TOKENS = 0.012, 30


def full(*slacks_s: float, mode: str = "swap", num_tokens: int = NUM_TOKENS) -> tuple[Instance, list[Work]]:
    """An instance that two streams fill, which have this slack at time 0. Their prompts were computed there."""
    instance = Instance("aligned", SMALL, preemption_mode=mode)
    streams = [
        make_work(144, 0, 0, deadlines=Deadlines(True, 9.0, (slack_s + 1.0) / num_tokens))
        for slack_s in slacks_s
    ]
    instance.waits(*streams)
    for _ in range(num_tokens):
        assert instance.iterate(-1.0).run == keys(*streams)
        instance.schedule.took(ITERATION_S)
    return instance, streams


def prompt_due(first_due_s: float = 0.3, num_tokens: int = 80) -> Work:
    """It needs 10 ms and 1 ms for each token."""
    return prompt(num_tokens, first_due_s)


def test_the_stream_with_most_slack_leaves_for_a_prompt_that_would_be_late() -> None:
    instance, (patient, more_patient) = full(5.0, 9.0)
    instance.waits(first := prompt_due())
    assert instance.iterate(0.0).wants_evicted == [key(more_patient)]
    assert instance.iterate(0.0).wants_evicted == [key(more_patient)], "what was named stays named"
    assert instance.schedule.blocks.evict(key(more_patient)) and instance.schedule.blocks.evicted(
        key(more_patient)
    )
    assert instance.iterate(0.0).run == [key(patient), key(first)]


def test_a_stream_stays_that_would_have_less_slack_than_the_prompt_once_it_is_back() -> None:
    """The prompt's is 0.21 s, and the way out and back takes 0.35 s."""
    for slack_s, is_evicted in ((0.2, False), (0.5, False), (0.6, True)):
        instance, _ = full(slack_s, slack_s)
        instance.waits(prompt_due())
        assert len(instance.iterate(0.0).wants_evicted) == is_evicted, slack_s


def test_a_first_token_that_was_early_is_no_slack() -> None:
    """It was due 10 s later, as these requests have it; the reader would see a pause of that."""
    instance, _ = full(0.0, 0.0)
    instance.waits(prompt_due())
    assert not instance.iterate(0.0).wants_evicted


@pytest.mark.parametrize("first_due_s", [0.05, -1.0, -9999.0])
def test_none_leaves_for_a_prompt_that_is_late_in_any_case(first_due_s: float) -> None:
    instance, _ = full(5.0, 9.0)
    instance.waits(prompt_due(first_due_s))
    assert not instance.iterate(0.0).wants_evicted


def test_none_leaves_for_a_prompt_that_can_wait_for_room() -> None:
    instance, _ = full(5.0, 9.0)
    instance.waits(prompt_due(0.6))
    assert not instance.iterate(0.0).wants_evicted


def test_a_prompt_that_is_late_keeps_none_waiting_that_can_be_in_time() -> None:
    instance, (_, more_patient) = full(5.0, 9.0)
    instance.waits(prompt_due(-1.0), first := prompt_due())
    assert instance.iterate(0.0).wants_evicted == [key(more_patient)]
    assert instance.schedule.blocks.evict(key(more_patient)) and instance.schedule.blocks.evicted(
        key(more_patient)
    )
    assert key(first) in instance.iterate(0.0).run


def test_none_leaves_where_the_prompt_would_find_no_room() -> None:
    instance, _ = full(0.1, 9.0)
    instance.waits(prompt_due(0.5, num_tokens=240))
    assert not instance.iterate(0.0).wants_evicted


def test_a_stream_runs_for_as_long_as_its_way_takes_before_it_leaves() -> None:
    """With a quarter of its tokens that is 8 iterations."""
    for num_tokens, is_evicted in ((20, False), (NUM_TOKENS, True)):
        instance, _ = full(5.0, 9.0, num_tokens=num_tokens)
        instance.waits(prompt_due(0.4, num_tokens=100))
        assert len(instance.iterate(0.0).wants_evicted) == is_evicted, num_tokens


def test_a_stream_that_returned_stays_until_it_has_earned_its_way_again() -> None:
    instance, (patient, more_patient) = full(-0.5, 9.0)
    instance.waits(prompt_due())
    assert instance.iterate(0.0).wants_evicted == [key(more_patient)]
    assert instance.schedule.blocks.evict(key(more_patient)) and instance.schedule.blocks.evicted(
        key(more_patient)
    )
    instance.iterate(0.0)
    instance.schedule.blocks.ended(key(patient))
    back = make_work(144, NUM_TOKENS + 1, deadlines=Deadlines(True, 0.0, 9.0))
    instance.waits(back)
    (pull,) = instance.schedule.plan(0.0).pulls
    assert pull is back and instance.schedule.blocks.pulled(key(back))
    instance.iterate(0.0)
    instance.waits(prompt_due(num_tokens=100))
    assert not instance.iterate(0.0).wants_evicted


def test_best_effort_leaves_before_real_time_with_slack() -> None:
    instance = Instance("aligned", SMALL)
    instance.runs(document := job(num_tokens=160), stream(0.5, 9.0), now=-1.0)
    instance.iterate(-1.0)
    instance.waits(prompt_due(num_tokens=200))
    assert instance.iterate(0.0).wants_evicted == [key(document)]


def test_best_effort_that_is_too_little_leaves_with_real_time() -> None:
    instance, (patient, more_patient) = full(0.1, 9.0)
    instance.schedule.blocks.ended(key(patient))
    instance.runs(document := job(num_tokens=70), now=-1.0)
    instance.waits(prompt_due(0.65, num_tokens=300))
    assert instance.iterate(0.0).wants_evicted == [key(document), key(more_patient)]


def test_where_kv_is_computed_again_that_has_to_be_in_its_slack() -> None:
    """Computing 174 tokens takes 0.18 s, and the prompt's slack is 0.01 s."""
    for slack_s, is_dropped in ((0.1, False), (0.3, True)):
        instance, _ = full(slack_s, slack_s, mode="recompute")
        instance.waits(prompt_due(0.1))
        assert len(instance.schedule.plan(0.0).drops) == is_dropped, slack_s


def test_none_leaves_where_running_requests_are_not_preempted_for_new_ones() -> None:
    instance, _ = full(5.0, 9.0, mode="defer")
    instance.waits(prompt_due())
    assert not instance.iterate(0.0).wants_evicted
