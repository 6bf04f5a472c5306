import math

import pytest
from msgspec.structs import replace

from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.timing.deadlines import DEMOTION_S, Deadlines, latest_start_s, place_s


def test_a_request_that_is_ahead_waits_no_longer_for_a_token_than_its_objective() -> None:
    real_time = Deadlines(is_rt=True, first_due_s=1.0, tbt_s=0.05)
    assert real_time.allowance_s(10, now=0.2) == 0.05


def test_what_is_left_of_the_allowance_is_what_was_not_used() -> None:
    real_time = Deadlines(is_rt=True, first_due_s=1.0, tbt_s=0.05)
    assert real_time.allowance_s(2, now=1.08) == pytest.approx(0.02)
    assert real_time.allowance_s(2, now=1.2) == pytest.approx(-0.1)


def test_an_objective_is_lost_when_it_can_not_be_caught_up_with() -> None:
    real_time = Deadlines(is_rt=True, first_due_s=1.0, tbt_s=0.05)
    assert not real_time.is_lost(2, now=1.149) and real_time.is_lost(2, now=1.151)
    early = replace(real_time, early_s=2.0)
    assert not early.is_lost(2, now=3.09) and early.is_lost(2, now=3.11)


def test_nothing_is_due_by_default() -> None:
    whenever = Deadlines()
    assert whenever.token_due_s(0) == whenever.token_due_s(5) == math.inf
    assert whenever.allowance_s(0, now=1e9) == math.inf
    assert not whenever.is_lost(3, now=1e9)
    assert whenever.job_allowance_s(10, now=1e9) == math.inf


def test_a_window_is_spread_over_the_tokens_that_are_left() -> None:
    job = Deadlines(job_due_s=100.0)
    assert job.job_allowance_s(50, now=0.0) == 2.0
    # ten tokens later: five seconds more than planned were used
    assert job.job_allowance_s(40, now=25.0) == pytest.approx(75 / 40)


@pytest.mark.parametrize(
    "name, value", [("be_share", 1.0), ("rt_headroom", -0.1), ("chunk_share", 0.0), ("be_pace", 0.0)]
)
def test_shares_are_shares(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        SchedulingConfig(**{name: value})  # type: ignore[arg-type]


def test_the_order_within_a_class_is_that_of_the_latest_start() -> None:
    first = Deadlines(is_rt=True, first_due_s=5.0, tbt_s=0.1)
    assert latest_start_s(first, 0, needed_s=2.0, arrived_s=4.0) == 3.0
    # recovered in the middle of its stream: what is due is its next token
    assert latest_start_s(first, 3, needed_s=0.1, arrived_s=4.0) == pytest.approx(5.2)
    assert latest_start_s(Deadlines(job_due_s=100.0), 0, needed_s=30.0, arrived_s=0.0) == 70.0


def test_without_an_objective_it_is_the_order_of_arrival() -> None:
    real_time, whenever = Deadlines(is_rt=True), Deadlines()
    for deadlines in (real_time, whenever):
        starts = [latest_start_s(deadlines, 0, 0.5, arrived_s) for arrived_s in (1.0, 2.0, 3.0)]
        assert starts == sorted(starts)
    assert latest_start_s(whenever, 0, 0.1, 1.0) < latest_start_s(whenever, 0, 0.2, 1.0)
    # nothing is lost that was never asked for
    assert place_s(whenever, 0, 0.1, 1.0, now=1e6) == pytest.approx(1.1)


def test_who_can_not_make_it_goes_behind_those_who_can_but_not_behind_all() -> None:
    lost, live = Deadlines(is_rt=True, first_due_s=10.0), Deadlines(is_rt=True, first_due_s=12.0)
    late = Deadlines(is_rt=True, first_due_s=10.5 + DEMOTION_S)
    now = 9.5
    places = [place_s(each, 0, 1.0, 0.0, now) for each in (live, lost, late)]
    assert places == sorted(places)
