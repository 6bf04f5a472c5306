"""Deadlines use the router's clock, not the gateway's."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from alignedserve.protocol.messages import NewTokens, Offer, Prefill, Submit
from alignedserve.router.clock import deadlines_of, with_first_token
from alignedserve.timing.deadlines import Deadlines
from tests.router.script import DECODE, GATEWAY, ONE, PREFILL, Script, prefill_report, request


def submit(ttft_s: float | None = None, tbt_s: float | None = None, **options: object) -> Submit:
    return Submit(replace(request(arrival_s=5e6), ttft_s=ttft_s, tbt_s=tbt_s), **options)  # type: ignore[arg-type]


def test_a_gateway_says_how_long_it_has_waited() -> None:
    """Its own clock is five million seconds ahead of the router's."""
    found = deadlines_of(submit(0.8, 0.05, waited_s=0.3), now=100.0)
    assert found.first_due_s == pytest.approx(100.5)
    assert found == Deadlines(True, found.first_due_s, 0.05)


def test_a_jobs_window_is_shifted_likewise() -> None:
    line = replace(request(arrival_s=5e6), tier="be", deadline_s=5e6 + 3600.0)
    assert deadlines_of(Submit(line, waited_s=2.0), now=100.0).job_due_s == pytest.approx(3698.0)
    assert deadlines_of(Submit(replace(line, deadline_s=None)), now=100.0) == Deadlines()
    assert deadlines_of(Submit(replace(line, is_pressed=True)), now=100.0).is_pressed


def test_a_late_first_token_moves_the_others_and_one_in_time_does_not() -> None:
    deadlines = Deadlines(True, 10.0, 0.1)
    assert with_first_token(deadlines, 9.0).token_due_s(1) == pytest.approx(9.1)
    assert with_first_token(deadlines, 12.0).token_due_s(3) == pytest.approx(12.3)
    assert with_first_token(Deadlines(True, tbt_s=0.1), 12.0).token_due_s(1) == pytest.approx(12.1)
    job = Deadlines(job_due_s=1.0)
    assert with_first_token(job, 12.0) == job


@given(
    st.integers(1, 500),
    st.floats(0.0, 100.0),
    st.none() | st.floats(0.01, 10),
    st.none() | st.floats(0.01, 1),
)
def test_who_comes_back_with_tokens_is_due_from_now_on(
    num_delivered: int, waited_s: float, ttft_s: float | None, tbt_s: float | None
) -> None:
    now = 200.0
    again = submit(ttft_s, tbt_s, delivered=[1] * num_delivered, waited_s=waited_s)
    due_s = deadlines_of(again, now).token_due_s(num_delivered)
    assert due_s == math.inf if tbt_s is None else due_s >= now + 0.999 * tbt_s


def test_instances_hear_of_deadlines_and_predictions() -> None:
    script = Script()
    script.now = 50.0
    script.say(GATEWAY, submit(0.5, 0.1, waited_s=0.2, predicted_len=7))
    script.reserve()
    work = script.take_one(Prefill, PREFILL).works[0]
    first_due_s = work.deadlines.first_due_s
    assert first_due_s == pytest.approx(50.3)
    assert (work.deadlines, work.predicted_len) == (Deadlines(True, first_due_s, 0.1), 7)
    script.now = 51.0
    script.say(PREFILL, prefill_report(news=[NewTokens(ONE, 0, [50])], saved=[(ONE, 6)]))
    script.chosen(1)
    work = script.take_one(Offer, DECODE).works[0]
    assert work.deadlines == Deadlines(True, 51.0, 0.1)


def test_a_first_token_before_its_time_keeps_what_it_is_early_by() -> None:
    for objective_s, early_s in ((2.0, 1.5), (0.4, 0.0), (None, 0.0)):
        deadlines = with_first_token(deadlines_of(submit(objective_s, 0.1), 100.0), 100.5)
        assert deadlines.first_due_s == 100.5 and deadlines.early_s == pytest.approx(early_s)
