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

# The ids of jobs that were made through Anthropic's API begin with this.
MESSAGE_BATCH = "msgbatch_"


def new_file_id() -> FileId:
    return FileId(f"file-{secrets.token_hex(12)}")


def new_job_id(prefix: str = "batch_") -> JobId:
    return JobId(prefix + secrets.token_hex(12))


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file; its bytes are stored beside it, or apart from it, in `num_chunks` chunks."""

    id: FileId
    filename: str
    purpose: Purpose
    num_bytes: int
    num_chunks: int
    created_at: int
    expires_at: int | None = None
    # The file's owner (gateway/http/keys.py); "" where no keys are needed.
    owner: str = ""
    # Whether the bytes are in a directory or a bucket (contents.py), and not in the store.
    is_apart: bool = False


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a job was not accepted."""

    code: str
    message: str
    # The line in the input file, counted from 1.
    line: int | None = None
    param: str | None = None


class PlacedInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """An input file that was not uploaded: it is read where it is, as long as it is the same."""

    url: str
    num_bytes: int
    # Another one means that the file has changed: an ETag, or what a file system says in place of it.
    version: str


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    # The fields with which the job was created.
    id: JobId
    endpoint: str
    input_file_id: FileId
    completion_window: str
    created_at: int
    expires_at: int
    # JSON. Older records hold the object itself.
    metadata: bytes | dict[str, str] | None = None
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
    # The input file, if it was not uploaded; `input_file_id` is its URL then.
    placed_input: PlacedInput | None = None

    @property
    def stored_input_id(self) -> str:
        """The id of the uploaded file that must be there as long as the job is open; "" if there is none."""
        return "" if self.placed_input else self.input_file_id

    @property
    def is_message_batch(self) -> bool:
        """Whether it was made through Anthropic's API, and its results are in that API's form."""
        return self.id.startswith(MESSAGE_BATCH)

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
    # The failed lines which were cancelled with the job, and those which had no answer when its time was up.
    num_cancelled: int = 0
    num_expired: int = 0


# Why a line was not answered, if its job's end is the reason.
Ending = Literal["cancelled", "expired"]


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
    ending: Ending | None = None
