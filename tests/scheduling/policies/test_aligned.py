"""How much of a prompt is computed beside streams, under `aligned`."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Work
from alignedserve.timing.deadlines import DEMOTION_S, Deadlines
from tests.scheduling.policies.instance import LIMITS, Instance, job, key, prompt
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

# Room for two streams of 160 tokens, and for a prompt of 80 beside one of them.
SMALL = replace(LIMITS, num_blocks=24, max_model_len=320)


def answer(slack_s: float, tbt_s: float = 0.5, num_tokens: int = 160, num_fetched: int | None = None) -> Work:
    """A stream whose next token is due at `slack_s`."""
    return make_work(num_tokens, num_cached=num_fetched, deadlines=Deadlines(True, slack_s - tbt_s, tbt_s))


def full(*answers: Work, preemption_mode: str = "swap") -> Instance:
    """An instance at time 0 on which these decode and fill it."""
    instance = Instance("aligned", SMALL, preemption_mode=preemption_mode)
    instance.runs(*answers, now=-1.0)
    instance.iterate(-0.1)
    return instance


def test_the_stream_with_most_slack_leaves_for_a_prompt_that_would_be_late() -> None:
    patient, more_patient = answer(5.0), answer(9.0)
    instance = full(patient, more_patient)
    instance.waits(first := prompt(80, first_due_s=0.5))
    plan = instance.iterate(0.0)
    assert plan.wants_evicted == [key(more_patient)] and not plan.chunks
    assert instance.schedule.evict(key(more_patient)) and instance.schedule.evicted(key(more_patient))
    assert instance.iterate(0.0).run == [key(patient), key(first)]


def test_a_stream_stays_that_has_no_more_slack_than_the_prompt() -> None:
    """It is back after 0.16 s: the pool has its KV already. The prompt needs 0.09 s."""
    for slack_s, is_evicted in ((0.5, False), (0.56, False), (0.58, True)):
        instance = full(answer(slack_s - 0.5), answer(slack_s - 0.5))
        instance.waits(prompt(80, first_due_s=0.5))
        assert len(instance.iterate(0.0).wants_evicted) == is_evicted, slack_s


@pytest.mark.parametrize("first_due_s", [0.05, -1.0, -9999.0])
def test_none_leaves_for_a_prompt_that_is_late_in_any_case(first_due_s: float) -> None:
    instance = full(answer(5.0), answer(9.0))
    instance.waits(prompt(80, first_due_s=first_due_s))
    assert not instance.iterate(0.0).wants_evicted


def test_none_leaves_where_the_prompt_would_find_no_room() -> None:
    instance = full(answer(-0.3), answer(9.0))
    instance.waits(prompt(240, first_due_s=0.5))
    assert not instance.iterate(0.0).wants_evicted


def test_a_stream_that_is_lost_leaves_before_one_with_slack() -> None:
    lost = answer(-50.0)
    instance = full(answer(9.0), lost)
    instance.waits(prompt(80, first_due_s=0.5))
    assert instance.iterate(0.0).wants_evicted == [key(lost)]


def test_a_stream_yields_a_token_before_it_leaves_again() -> None:
    instance = Instance("aligned", SMALL)
    instance.runs(back := answer(9.0), answer(0.1), now=-1.0)
    instance.waits(prompt(80, first_due_s=0.5))
    assert not instance.schedule.plan(0.0).wants_evicted
    instance.iterate(0.0)
    assert instance.iterate(0.0).wants_evicted == [key(back)]


def test_best_effort_leaves_before_real_time_with_slack() -> None:
    instance = full(document := job(num_tokens=160), answer(9.0))
    instance.waits(prompt(80, first_due_s=0.5))
    assert instance.iterate(0.0).wants_evicted == [key(document)]


def test_where_kv_is_computed_again_that_has_to_be_in_its_slack() -> None:
    """What the pool does not have of it, two tokens, takes 12 ms to compute."""
    for slack_s, is_dropped in ((0.58, False), (0.6, True)):
        instance = full(answer(slack_s - 0.5), answer(slack_s - 0.5), preemption_mode="recompute")
        instance.waits(prompt(80, first_due_s=0.5))
        assert len(instance.schedule.plan(0.0).drops) == is_dropped, slack_s
