"""What a gateway reports about jobs, its own and others', and whether they are too slow."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from alignedserve.batch.estimate import JobEstimate
from alignedserve.batch.forecast import HEARD_S, JobForecast
from alignedserve.store import JobId, Tally

NOBODY: Any = None
JOB = JobId("batch_1")


def test_what_another_one_said_ages_until_it_is_too_old() -> None:
    now = 100.0
    forecast = JobForecast(NOBODY, 1, lambda: now)
    assert forecast.of(JOB) is None
    forecast.hear("gateway-1", {JOB: (30.0, 0.25), JobId("batch_2"): (None, 0.0)})
    assert forecast.of(JOB) == JobEstimate(30.0, 0.25)
    now += 4
    assert forecast.of(JOB) == JobEstimate(26.0, 0.25)
    assert forecast.of(JobId("batch_2")) == JobEstimate(None, 0.0)
    assert forecast.said() == {}, "what was heard is not passed on"
    now = 100.0 + HEARD_S
    assert forecast.of(JOB) is None


def test_what_it_knows_itself_goes_first() -> None:
    now = 100.0
    forecast = JobForecast(NOBODY, 1, lambda: now)
    forecast._found, forecast._found_s = {JOB: JobEstimate(10.0, 0.5)}, now
    forecast.hear("gateway-1", {JOB: (30.0, 0.25)})
    now += 3
    assert forecast.of(JOB) == JobEstimate(7.0, 0.5)
    ((job, said),) = forecast.said().items()
    assert job == JOB and said == pytest.approx((7.0, 0.5))


class Jobs:
    """A store with jobs of 200 lines, of each of which as many are done."""

    def __init__(self, windows: list[float]) -> None:
        self.windows = {JobId(f"batch_{number}"): window_s for number, window_s in enumerate(windows)}
        self.ids = [*self.windows]
        self.num_done = 0

    async def tally(self, job_id: JobId) -> Tally:
        return Tally(
            num_completed=self.num_done,
            num_line_bytes=100 * self.num_done,
            num_input_tokens=10 * self.num_done,
            num_output_tokens=10 * self.num_done,
        )

    async def job(self, job_id: JobId) -> Any:
        return SimpleNamespace(num_lines=200, input_file_id="file-1", expires_at=self.windows[job_id])

    async def file(self, file_id: str) -> Any:
        return SimpleNamespace(num_bytes=20_000)

    async def open_jobs(self, stage: str, count: int) -> list[JobId]:
        return self.ids


# A line a second is done of each, and 20 are done: in turns there are 180 s left.
@pytest.mark.parametrize(
    "windows, goes_by_window, are_late",
    [
        ([260.0], False, False),
        ([230.0], True, True),
        ([1000.0, 1000.0], False, False),
        # 90 s if it goes first
        ([150.0, 1000.0], True, False),
        ([1000.0, 150.0], True, False),
        ([105.0, 1000.0], True, True),
        # the second one, after the first
        ([150.0, 200.0], True, True),
    ],
)
def test_jobs_are_late_that_would_hardly_be_done_in_time_even_by_their_windows(
    windows: list[float], goes_by_window: bool, are_late: bool
) -> None:
    now, jobs = 0.0, Jobs(windows)
    store: Any = jobs
    forecast = JobForecast(store, 2, lambda: now)
    asyncio.run(forecast.look(jobs.ids))
    assert not forecast.are_late, "nothing is known yet"
    for _ in range(20):
        now, jobs.num_done = now + 1, jobs.num_done + 1
        asyncio.run(forecast.look(jobs.ids))
    for job_id in jobs.ids:
        estimate = forecast.of(job_id)
        assert estimate and estimate.left_s == pytest.approx(180.0, rel=0.05)
    assert (forecast.goes_by_window, forecast.are_late) == (goes_by_window, are_late)
    asyncio.run(forecast.look([]))
    assert not forecast.goes_by_window and not forecast.are_late
