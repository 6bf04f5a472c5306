"""The interface to the store.

Everything is durable when the call returns. Every method raises StoreAway when the store can't be reached; whether the
change has happened then is not known, and all of them may be repeated: what is there already stays as it is.

A job is worked on by whoever holds its lease. Whatever a holder writes is written only while it still holds it, which
the store checks in the same step: one that has lost it, and does not know yet, changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from alignedserve.store.records import FileId, FileRecord, JobId, JobRecord, LineResult, Purpose, Tally

# Data of a file that was never committed goes after so long without another chunk.
UNCOMMITTED_S = 3600

Order = Literal["asc", "desc"]


class StoreAway(Exception):
    """The store can't be reached now."""


class LeaseLost(Exception):
    """The job is somebody else's by now, or nobody's."""


@dataclass(frozen=True)
class Lease:
    job_id: JobId
    # no two leases ever have the same
    token: str


@dataclass(frozen=True)
class Page:
    """Some ids of a listing, in order."""

    ids: list[str]
    has_more: bool


class Store(ABC):
    @abstractmethod
    async def close(self) -> None: ...

    # ---- files ----

    @abstractmethod
    async def put_chunk(self, file_id: FileId, number: int, data: bytes) -> None:
        """Of a file that is not committed yet."""

    @abstractmethod
    async def commit_file(self, file: FileRecord) -> None:
        """From here on it is there, with the chunks that were put. Raises ValueError when they have gone."""

    @abstractmethod
    async def drop_chunks(self, file_id: FileId) -> None:
        """It will not be committed; if it was, nothing happens."""

    @abstractmethod
    async def file(self, file_id: FileId) -> FileRecord | None: ...

    @abstractmethod
    async def chunk(self, file_id: FileId, number: int) -> bytes | None:
        """None: the file is gone."""

    @abstractmethod
    async def delete_file(self, file_id: FileId) -> Literal["deleted", "absent", "in_use"]:
        """`in_use`: it is the input of a job that is not over."""

    @abstractmethod
    async def list_files(
        self, purpose: Purpose | None, after: FileId | None, limit: int, order: Order
    ) -> Page | None:
        """By age. None: there is no file `after`."""

    @abstractmethod
    async def expired_files(self, now: float) -> list[FileId]:
        """They may be deleted."""

    # ---- jobs ----

    @abstractmethod
    async def add_job(self, job: JobRecord) -> bool:
        """False: its input file is not there."""

    @abstractmethod
    async def job(self, job_id: JobId) -> JobRecord | None: ...

    @abstractmethod
    async def tally(self, job_id: JobId) -> Tally: ...

    @abstractmethod
    async def list_jobs(self, after: JobId | None, limit: int) -> Page | None:
        """Newest first. None: there is no job `after`."""

    @abstractmethod
    async def open_jobs(self) -> list[JobRecord]:
        """Those that are not over, the most urgent first."""

    @abstractmethod
    async def replace_job(self, old: JobRecord, new: JobRecord, lease: Lease | None) -> bool:
        """False: it is not `old` any more. `lease`: of the holder, who raises LeaseLost when it is not his; None: for
        others. A job that is over by this is worked on no more: lease, results and hold on the input go."""

    # ---- what was learned ----

    @abstractmethod
    async def put_state(self, name: str, data: bytes) -> None:
        """In place of what was there."""

    @abstractmethod
    async def state(self, name: str) -> bytes | None: ...

    # ---- leases ----

    @abstractmethod
    async def acquire(self, job_id: JobId, owner: str, seconds: float) -> Lease | None:
        """None: somebody else holds it."""

    @abstractmethod
    async def renew(self, lease: Lease, seconds: float) -> None:
        """Raises LeaseLost."""

    @abstractmethod
    async def release(self, lease: Lease) -> None:
        """Nothing happens when it is lost."""

    # ---- results ----

    @abstractmethod
    async def put_result(self, lease: Lease, line: int, result: LineResult) -> None:
        """The first one of a line counts. Raises LeaseLost."""

    @abstractmethod
    async def lines_done(self, job_id: JobId) -> list[int]: ...

    @abstractmethod
    async def results(self, job_id: JobId, lines: Sequence[int]) -> list[LineResult | None]: ...

    @abstractmethod
    async def finish_job(
        self, old: JobRecord, new: JobRecord, lease: Lease, files: Sequence[FileRecord]
    ) -> bool:
        """replace_job, and `files` are committed in the same step."""
