"""The records that are stored. Times are seconds since 1970, as in OpenAI's objects.

A record is replaced only if its bytes are still those that were read: `omit_defaults` keeps them equal when a field is
added.
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
    """A file; its bytes are stored beside it in `num_chunks` chunks."""

    id: FileId
    filename: str
    purpose: Purpose
    num_bytes: int
    num_chunks: int
    created_at: int
    expires_at: int | None = None
    # The file's owner (gateway/http/keys.py); "" where no keys are needed.
    owner: str = ""


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a job was not accepted."""

    code: str
    message: str
    # The line in the input file, counted from 1.
    line: int | None = None
    param: str | None = None


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    # The fields with which the job was created.
    id: JobId
    endpoint: str
    input_file_id: FileId
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    owner: str = ""
    # The state of the job (alignedserve/batch/job.py).
    status: Status = "validating"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    # Whether the deadline came before the last answer.
    is_late: bool = False
    # The model, which validation has found.
    model: str | None = None
    num_lines: int = 0
    problems: list[Problem] = []
    # The ids of the files that are made at the end.
    output_file_id: FileId | None = None
    error_file_id: FileId | None = None
    # The seconds for which these are kept; None: until they are deleted.
    output_expires_after_s: int | None = None
    # Where the job itself asks to be told of its end.
    webhook_url: str | None = None

    @property
    def is_over(self) -> bool:
        return self.status in ("failed", "completed", "expired", "cancelled")


class Tally(msgspec.Struct, frozen=True):
    """Counts of a job's lines that are done."""

    num_completed: int = 0
    num_failed: int = 0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    # The input tokens whose KV was reused from earlier prompts.
    num_cached_tokens: int = 0
    # The bytes of results, which are stored until the job is over.
    num_result_bytes: int = 0
    # The bytes of the lines in the input file.
    num_line_bytes: int = 0


class LineResult(msgspec.Struct, frozen=True):
    """The answer to one line, as it will be in the output or the error file."""

    is_error: bool
    # A line of JSON, without its end.
    text: bytes
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    # The bytes of the line in the input file.
    num_line_bytes: int = 0
