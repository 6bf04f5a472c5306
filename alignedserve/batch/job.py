"""The states of a job, as in OpenAI's API. The functions are pure, and a repeated event has no further effect.

validating ── in_progress ── finalizing ── completed
    │              ├─ failed     └──────── expired     (the deadline came first)
    └─ failed      └── cancelling ──────── cancelled   (also from validating)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from alignedserve.store.records import FileId, JobRecord, Problem


@dataclass(frozen=True)
class Valid:
    num_lines: int
    model: str | None


@dataclass(frozen=True)
class Invalid:
    problems: list[Problem]


@dataclass(frozen=True)
class AllAnswered:
    """Every line has a result."""


@dataclass(frozen=True)
class TimeUp:
    """Every line has a result. Those without one at the deadline got an error."""


@dataclass(frozen=True)
class CancelAsked:
    pass


@dataclass(frozen=True)
class Written:
    """The results are in files. An id is None if there was nothing to write to that file."""

    output: FileId | None
    errors: FileId | None


Event = Valid | Invalid | AllAnswered | TimeUp | CancelAsked | Written


def after(job: JobRecord, event: Event, now: int) -> JobRecord:
    """Returns the job after the event. Returns `job` itself if the event has no effect, because it is a repetition or
    another event came first."""
    step = _STEPS.get((job.status, type(event)))
    return job if step is None else step(job, event, now)


def _valid(job: JobRecord, event: Valid, now: int) -> JobRecord:
    return replace(
        job, status="in_progress", in_progress_at=now, num_lines=event.num_lines, model=event.model
    )


def _invalid(job: JobRecord, event: Invalid, now: int) -> JobRecord:
    return replace(job, status="failed", failed_at=now, problems=event.problems)


def _all_answered(job: JobRecord, event: AllAnswered, now: int) -> JobRecord:
    return replace(job, status="finalizing", finalizing_at=now)


def _time_up(job: JobRecord, event: TimeUp, now: int) -> JobRecord:
    return replace(job, status="finalizing", finalizing_at=now, is_late=True)


def _cancel(job: JobRecord, event: CancelAsked, now: int) -> JobRecord:
    return replace(job, status="cancelling", cancelling_at=now)


def _written(job: JobRecord, event: Written, now: int) -> JobRecord:
    job = replace(job, output_file_id=event.output, error_file_id=event.errors)
    if job.is_late:
        return replace(job, status="expired", expired_at=now)
    return replace(job, status="completed", completed_at=now)


def _cancelled(job: JobRecord, event: Written, now: int) -> JobRecord:
    return replace(
        job,
        status="cancelled",
        cancelled_at=now,
        output_file_id=event.output,
        error_file_id=event.errors,
    )


_STEPS: dict[tuple[str, type[Any]], Callable[[JobRecord, Any, int], JobRecord]] = {
    ("validating", Valid): _valid,
    ("validating", Invalid): _invalid,
    ("validating", CancelAsked): _cancel,
    ("in_progress", AllAnswered): _all_answered,
    ("in_progress", TimeUp): _time_up,
    ("in_progress", CancelAsked): _cancel,
    # Its input file no longer exists.
    ("in_progress", Invalid): _invalid,
    ("finalizing", Written): _written,
    ("cancelling", Written): _cancelled,
}


def parse_window(text: str) -> int:
    """Returns the window in seconds. Raises ValueError unless it is from 10m to 7d."""
    unit = {"m": 60, "h": 3600, "d": 86400}.get(text[-1:])
    digits = text[:-1]
    seconds = int(digits) * unit if unit and digits.isascii() and digits.isdigit() and len(digits) < 6 else 0
    if not 600 <= seconds <= 7 * 86400:
        raise ValueError(f"completion_window={text!r}: must be from 10m to 7d")
    return seconds
