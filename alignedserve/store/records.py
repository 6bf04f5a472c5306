"""What is stored. Times are seconds since 1970, as in OpenAI's objects.

A record is replaced if it still reads as it was read: `omit_defaults` keeps that so when a field is added.
"""

from __future__ import annotations

import secrets
from typing import Literal, NewType

import msgspec

FileId = NewType("FileId", str)
JobId = NewType("JobId", str)

Purpose = Literal["batch", "batch_output"]
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]


def new_file_id() -> FileId:
    return FileId(f"file-{secrets.token_hex(12)}")


def new_job_id() -> JobId:
    return JobId(f"batch_{secrets.token_hex(12)}")


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Its bytes are `num_chunks` chunks beside it."""

    id: FileId
    filename: str
    purpose: Purpose
    num_bytes: int
    num_chunks: int
    created_at: int
    expires_at: int | None = None
    # whose it is (gateway/http/keys.py); "": where no keys are needed
    owner: str = ""


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a job was not accepted."""

    code: str
    message: str
    # of the input file, from 1
    line: int | None = None
    param: str | None = None


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    # as it was asked for
    id: JobId
    endpoint: str
    input_file_id: FileId
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    owner: str = ""
    # of its way so far (alignedserve/batch/job.py)
    status: Status = "validating"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    # the deadline came before the last answer
    is_late: bool = False
    # found by validation
    model: str | None = None
    num_lines: int = 0
    problems: list[Problem] = []
    # made at the end
    output_file_id: FileId | None = None
    error_file_id: FileId | None = None

    @property
    def is_over(self) -> bool:
        return self.status in ("failed", "completed", "expired", "cancelled")


class Tally(msgspec.Struct, frozen=True):
    """Of a job's lines that are done."""

    num_completed: int = 0
    num_failed: int = 0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    # of the input, those whose KV was there, of earlier prompts
    num_cached_tokens: int = 0
    # that are stored until the job is over
    num_result_bytes: int = 0


class LineResult(msgspec.Struct, frozen=True):
    """The answer to one line, as it will be in the output or the error file."""

    is_error: bool
    # a line of JSON, without its end
    text: bytes
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
