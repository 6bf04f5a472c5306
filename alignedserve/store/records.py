"""The stored records, and leases of the work on them. Times are seconds since 1970, as in OpenAI's objects.

A record is replaced only if its bytes are unchanged since it was read. `omit_defaults` keeps them equal when a field is
added.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NewType

import msgspec

FileId = NewType("FileId", str)
JobId = NewType("JobId", str)

Order = Literal["asc", "desc"]
Purpose = Literal["batch", "batch_output"]
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]

# Prefix of the ids of jobs from Anthropic's API.
MESSAGE_BATCH = "msgbatch_"


def new_file_id() -> FileId:
    return FileId(f"file-{secrets.token_hex(12)}")


def new_job_id(prefix: str = "batch_") -> JobId:
    return JobId(prefix + secrets.token_hex(12))


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file. Its content has `num_chunks` chunks, in the store or outside."""

    id: FileId
    filename: str
    purpose: Purpose
    num_bytes: int
    num_chunks: int
    created_at: int
    expires_at: int | None = None
    # The owner (gateway/http/keys.py); "" if no keys are required.
    owner: str = ""
    # Whether the content is in a directory or bucket (contents.py) and not in the store.
    is_apart: bool = False


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reason why a job was not accepted."""

    code: str
    message: str
    # The line in the input file, from 1.
    line: int | None = None
    param: str | None = None


class PlacedInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """An input file that is read in place, as long as it does not change."""

    url: str
    num_bytes: int
    # An ETag, or its equivalent for a local file. It differs if the file has changed.
    version: str


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    # Fields that are set when the job is created.
    id: JobId
    endpoint: str
    input_file_id: FileId
    completion_window: str
    created_at: int
    expires_at: int
    # JSON. Older records contain the object itself.
    metadata: bytes | dict[str, str] | None = None
    owner: str = ""
    # The job's state (alignedserve/batch/job.py).
    status: Status = "validating"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    # Whether the deadline passed before the last answer.
    is_late: bool = False
    # The model, which validation found.
    model: str | None = None
    num_lines: int = 0
    problems: list[Problem] = []
    # Ids of the output files.
    output_file_id: FileId | None = None
    error_file_id: FileId | None = None
    # Seconds for which these are kept; None: until they are deleted.
    output_expires_after_s: int | None = None
    # The job's own webhook, which is notified of its end.
    webhook_url: str | None = None
    # The input file, if it is read in place. `input_file_id` is then its URL.
    placed_input: PlacedInput | None = None

    @property
    def stored_input_id(self) -> str:
        """The id of the uploaded file that must exist while the job is open, or ""."""
        return "" if self.placed_input else self.input_file_id

    @property
    def is_message_batch(self) -> bool:
        """Whether the job was created through Anthropic's API. Its results then have that format."""
        return self.id.startswith(MESSAGE_BATCH)

    @property
    def is_over(self) -> bool:
        return self.status in ("failed", "completed", "expired", "cancelled")


class Tally(msgspec.Struct, frozen=True):
    """Counts of a job's completed lines."""

    num_completed: int = 0
    num_failed: int = 0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    # Input tokens from the prefix cache.
    num_cached_tokens: int = 0
    # Bytes of results, which are stored until the job ends.
    num_result_bytes: int = 0
    # Bytes of the lines in the input file.
    num_line_bytes: int = 0
    # Failed lines, by cause: cancelled with the job, or unanswered at its deadline.
    num_cancelled: int = 0
    num_expired: int = 0


# The reason why a line was not answered, if it is its job's end.
Ending = Literal["cancelled", "expired"]


class LineResult(msgspec.Struct, frozen=True):
    """The answer to a line, as it will be in the output or error file."""

    is_error: bool
    # A line of JSON, without the line break.
    text: bytes
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    # Size of the line in the input file.
    num_line_bytes: int = 0
    ending: Ending | None = None


class LeaseLost(Exception):
    """Another gateway, or none, has the lease now."""


@dataclass(frozen=True)
class Lease:
    # The id of a job, a response or a delivery.
    id: str
    # Unique among all leases of the same id.
    token: str

    def lost(self) -> LeaseLost:
        return LeaseLost(f"{self.id}: lease {self.token} is lost")


# The state of a lease at its renewal.
LeaseState = Literal["lost", "held", "cancelling"]


class Leases(ABC):
    @abstractmethod
    async def renew(self, leases: Sequence[Lease], seconds: float) -> list[LeaseState]: ...

    @abstractmethod
    async def release(self, lease: Lease) -> None:
        """Releases the lease, and marks its running lines as stopped. Does nothing if the lease is lost."""
