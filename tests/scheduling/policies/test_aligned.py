"""How much of a prompt is computed beside streams, under `aligned`."""

from __future__ import annotations

import pytest

from alignedserve.protocol.messages import Work
from alignedserve.timing.deadlines import DEMOTION_S, Deadlines
from tests.scheduling.policies.instance import Instance, job, key, prompt
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
        # what it asked for can't be had
        (0.001, -0.005, 0.022),
    ],
)
def test_a_prompt_has_the_time_that_a_stream_can_wait(tbt_s: float, slack_s: float, seconds: float) -> None:
    count = num_computed(stream(tbt_s, slack_s))
    # chunks end on block boundaries; of real time there is at least one
    most = SAFETY * seconds - 0.011
    assert count == max(int(1000 * most + 1e-6) // 16 * 16, 16)


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
