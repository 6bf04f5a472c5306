"""What a gateway says of a job that runs at another."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.batch.estimate import Estimate
from alignedserve.batch.forecast import HEARD_S, Forecast
from alignedserve.store import JobId

NOBODY: Any = None
JOB = JobId("batch_1")


def test_what_another_one_said_ages_until_it_is_too_old() -> None:
    now = 100.0
    forecast = Forecast(NOBODY, 1, lambda: now)
    assert forecast.of(JOB) is None
    forecast.hear("gateway-1", {JOB: (30.0, 0.25), JobId("batch_2"): (None, 0.0)})
    assert forecast.of(JOB) == Estimate(30.0, 0.25)
    now += 4
    assert forecast.of(JOB) == Estimate(26.0, 0.25)
    assert forecast.of(JobId("batch_2")) == Estimate(None, 0.0)
    assert forecast.said() == {}, "what was heard is not passed on"
    now = 100.0 + HEARD_S
    assert forecast.of(JOB) is None


def test_what_it_knows_itself_goes_first() -> None:
    now = 100.0
    forecast = Forecast(NOBODY, 1, lambda: now)
    forecast._found, forecast._found_s = {JOB: Estimate(10.0, 0.5)}, now
    forecast.hear("gateway-1", {JOB: (30.0, 0.25)})
    now += 3
    assert forecast.of(JOB) == Estimate(7.0, 0.5)
    assert forecast.said() == {JOB: (pytest.approx(7.0), 0.5)}
