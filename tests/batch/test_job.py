"""The states of a job: what each event does in each state, and that repeated or late events do nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from alignedserve.batch.job import (
    AllAnswered,
    CancelAsked,
    Event,
    Invalid,
    TimeUp,
    Valid,
    Written,
    after,
    parse_window,
)
from alignedserve.store import FileId, JobId, JobRecord, Problem

OUTPUT, ERRORS = FileId("file-1"), FileId("file-2")
EVENTS: list[Event] = [
    Valid(3, "demo"),
    Invalid([Problem("empty_file", "the file has no lines")]),
    AllAnswered(),
    TimeUp(),
    CancelAsked(),
    Written(OUTPUT, ERRORS),
]
NEW = JobRecord(
    id=JobId("batch_1"),
    endpoint="/v1/completions",
    input_file_id=FileId("file-0"),
    completion_window="1h",
    created_at=100,
    expires_at=3700,
)


def play(*events: Event) -> JobRecord:
    job = NEW
    for now, event in enumerate(events, 101):
        job = after(job, event, now)
    return job


def test_a_file_that_goes_takes_its_job_with_it() -> None:
    gone = Problem("file_not_found", "file file-0 is gone")
    job = play(Valid(3, "demo"), Invalid([gone]))
    assert (job.status, job.failed_at, job.problems) == ("failed", 102, [gone])


def test_all_goes_well() -> None:
    job = play(Valid(3, "demo"), AllAnswered(), Written(OUTPUT, None))
    assert job == replace(
        NEW,
        status="completed",
        num_lines=3,
        model="demo",
        in_progress_at=101,
        finalizing_at=102,
        completed_at=103,
        output_file_id=OUTPUT,
    )


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([EVENTS[1]], "failed"),
        ([Valid(3, None), TimeUp(), Written(OUTPUT, ERRORS)], "expired"),
        ([Valid(3, None), CancelAsked(), Written(OUTPUT, None)], "cancelled"),
        ([CancelAsked(), Written(None, None)], "cancelled"),
        # the last answer and the wish to cancel cross each other: who is first wins
        ([Valid(3, None), CancelAsked(), AllAnswered(), Written(OUTPUT, None)], "cancelled"),
        ([Valid(3, None), AllAnswered(), CancelAsked(), Written(OUTPUT, None)], "completed"),
    ],
)
def test_it_ends(events: list[Event], status: str) -> None:
    job = play(*events)
    assert job.status == status and job.is_over


@given(st.lists(st.sampled_from(EVENTS), max_size=8))
def test_no_event_is_taken_twice_and_an_end_is_final(events: list[Event]) -> None:
    job = NEW
    for event in events:
        changed = after(job, event, 200)
        assert after(changed, event, 300) is changed
        if job.is_over:
            assert changed is job
        job = changed


def test_no_way_goes_in_a_circle() -> None:
    """Each step sets a time of its own, and none is ever set again."""
    for events in itertools.permutations(EVENTS, 4):
        job = NEW
        for now, event in enumerate(events, 101):
            before = job
            job = after(job, event, now)
            for name in ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "cancelling_at"):
                assert getattr(before, name) in (None, getattr(job, name))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10m", 600), ("90m", 5400), ("1h", 3600), ("24h", 86400), ("168h", 604800), ("7d", 604800)],
)
def test_windows(text: str, seconds: int) -> None:
    assert parse_window(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "h", "0h", "169h", "8d", "1", "9m", "10081m", "-1h", "1.5h", " 1h", "1h ", "٣h"]
)
def test_windows_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="completion_window=.*must be from 10m to 7d"):
        parse_window(text)
