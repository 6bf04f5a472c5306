"""What a gateway says of jobs, its own and those of another, and whether they are too slow."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from alignedserve.batch.estimate import Estimate
from alignedserve.batch.forecast import HEARD_S, Forecast
from alignedserve.store import JobId, Tally

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


@pytest.mark.parametrize("window_s, are_late", [(110.0, True), (140.0, False)])
def test_jobs_are_late_that_would_hardly_be_done_in_their_window(window_s: float, are_late: bool) -> None:
    """Two lines a second are done of 200."""
    now = num_done = 0.0

    async def tally(job_id: JobId) -> Tally:
        return Tally(
            num_completed=int(num_done),
            num_line_bytes=int(100 * num_done),
            num_input_tokens=int(10 * num_done),
            num_output_tokens=int(10 * num_done),
        )

    async def job(job_id: JobId) -> Any:
        return SimpleNamespace(num_lines=200, input_file_id="file-1", expires_at=window_s)

    async def file(file_id: str) -> Any:
        return SimpleNamespace(num_bytes=20_000)

    async def open_jobs(stage: str, count: int) -> list[JobId]:
        return [JOB]

    store: Any = SimpleNamespace(tally=tally, job=job, file=file, open_jobs=open_jobs)
    forecast = Forecast(store, 1, lambda: now)
    asyncio.run(forecast.look([JOB]))
    assert not forecast.are_late, "nothing is known yet"
    for _ in range(10):
        now, num_done = now + 1, num_done + 2
        asyncio.run(forecast.look([JOB]))
    estimate = forecast.of(JOB)
    assert estimate and estimate.left_s == pytest.approx(90.0, rel=0.05)
    assert forecast.are_late == are_late
    asyncio.run(forecast.look([]))
    assert not forecast.are_late


# Each has 180 lines left, and two lines a second are done of all.
@pytest.mark.parametrize(
    "windows, goes_by_window, are_late",
    [
        ([1000.0, 1000.0], False, False),
        # 180 s in turns, 90 s if it goes first
        ([150.0, 1000.0], True, False),
        ([1000.0, 150.0], True, False),
        ([105.0, 1000.0], True, True),
        # the second one, after the first
        ([150.0, 200.0], True, True),
    ],
)
def test_jobs_are_not_late_if_it_is_enough_that_the_most_urgent_goes_first(
    windows: list[float], goes_by_window: bool, are_late: bool
) -> None:
    now = num_done = 0.0
    jobs = [JobId(f"batch_{number}") for number in range(len(windows))]

    async def tally(job_id: JobId) -> Tally:
        return Tally(
            num_completed=int(num_done),
            num_line_bytes=int(100 * num_done),
            num_input_tokens=int(10 * num_done),
            num_output_tokens=int(10 * num_done),
        )

    async def job(job_id: JobId) -> Any:
        expires_at = windows[jobs.index(job_id)]
        return SimpleNamespace(num_lines=200, input_file_id="file-1", expires_at=expires_at)

    async def file(file_id: str) -> Any:
        return SimpleNamespace(num_bytes=20_000)

    async def open_jobs(stage: str, count: int) -> list[JobId]:
        return jobs

    store: Any = SimpleNamespace(tally=tally, job=job, file=file, open_jobs=open_jobs)
    forecast = Forecast(store, 2, lambda: now)
    asyncio.run(forecast.look(jobs))
    for _ in range(20):
        now, num_done = now + 1, num_done + 1
        asyncio.run(forecast.look(jobs))
    assert (forecast.goes_by_window, forecast.are_late) == (goes_by_window, are_late)
    asyncio.run(forecast.look([]))
    assert not forecast.goes_by_window and not forecast.are_late
