"""The interface of the store.

Every change is durable when the call returns. Every method raises StoreAway when the store can't be reached; whether
the change was made is unknown then. All methods may be repeated: what is there already stays as it is.

A file and a job have an owner, which is a text. The store lists and counts by owner; whether a caller may see what
another owner has is decided outside of it. The stored bytes are limited (StoreLimits), in all and for each owner.

The content of a file is in the store, in chunks, or apart from it, in a directory or a bucket (contents.py). Of content
that is apart the store has the number of bytes, from before its first byte is written until its file is deleted.

A job is worked on by the holder of its lease. The holder's writes are made only while it holds the lease, which the
store checks in the same step: a holder which has lost it, and has not noticed, changes nothing. A lease that has
lapsed can be taken by any gateway, and until one does it is still its holder's: being slow costs nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from alignedserve.store.records import FileId, FileRecord, JobId, JobRecord, LineResult, Purpose, Tally

if TYPE_CHECKING:
    from alignedserve.store.deliveries import Delivery, DeliveryStore
    from alignedserve.store.responses import ResponseStore

# Chunks of a file that was never committed are deleted so many seconds after the last one.
UNCOMMITTED_S = 3600
# The seconds for which the place of a job that was deleted is known: somebody may be listing jobs page by page.
PLACE_KEPT_S = 3600
# The number of records that are deleted at a time, while other calls wait.
NUM_AT_A_TIME = 64
# The bytes of results that are fetched together.
RESULT_BYTES = 4 << 20

Order = Literal["asc", "desc"]
# What open jobs need next: their file validated, their lines answered, or to be brought to an end.
Stage = Literal["validate", "run", "end"]
STAGES: tuple[Stage, ...] = ("validate", "run", "end")
# The statuses of the jobs that are open, and of those that are in a stage.
OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")
STATUSES: dict[Stage, tuple[str, ...]] = {
    "validate": ("validating",),
    "run": ("in_progress",),
    "end": ("cancelling", "finalizing"),
}


class StoreAway(Exception):
    """The store can't be reached now."""


class LeaseLost(Exception):
    """Another gateway holds the job by now, or none does."""


class StoreFull(Exception):
    """There is no room for what was to be stored. The message is for the client."""


class TooManyJobs(Exception):
    """There are as many open jobs as allowed. The message is for the client."""


@dataclass(frozen=True)
class StoreLimits:
    """Limits of what is stored; None: there is no limit."""

    # The most bytes of files, results and jobs together: in all, and for each owner.
    max_bytes: int | None = None
    max_bytes_of_owner: int | None = None
    # The most jobs that are not over: in all, and for each owner.
    max_open_jobs: int | None = None
    max_open_jobs_of_owner: int | None = None
    # If an owner has more jobs than this, the oldest that are over are deleted.
    max_jobs_of_owner: int = 2000
    # The most bytes of content that is kept apart: in all, and for each owner.
    max_bytes_apart: int | None = None
    max_bytes_apart_of_owner: int | None = None

    def full(self, is_owners: bool, is_apart: bool = False) -> StoreFull:
        """Returns the error for what would be above the limit of bytes: the owner's, or that of all."""
        things = "files" if is_apart else "files and batches"
        if is_owners:
            limit = self.max_bytes_apart_of_owner if is_apart else self.max_bytes_of_owner
            return StoreFull(f"{things}: yours may have {limit} bytes; delete some")
        limit = self.max_bytes_apart if is_apart else self.max_bytes
        return StoreFull(f"{things}: all together may have {limit} bytes; delete some")

    def too_many_jobs(self, is_owners: bool) -> TooManyJobs:
        """Returns the error for one more open job: of the owner, or of all."""
        if is_owners:
            return TooManyJobs(
                f"{self.max_open_jobs_of_owner} of your batches are not over, and no more may be"
            )
        return TooManyJobs(f"{self.max_open_jobs} batches are not over, and no more may be")


@dataclass(frozen=True)
class Lease:
    job_id: JobId
    # No two leases of a job ever have the same token.
    token: str

    def lost(self) -> LeaseLost:
        return LeaseLost(f"job {self.job_id}: lease {self.token} is lost")


# The state of a lease at its renewal.
LeaseState = Literal["lost", "held", "cancelling"]


@dataclass(frozen=True)
class Page:
    """Some ids of a list, in order."""

    ids: list[str]
    has_more: bool


class Store(ABC):
    @abstractmethod
    async def close(self) -> None: ...

    @property
    @abstractmethod
    def is_down(self) -> bool:
        """Returns whether the store could not be reached and no probe has succeeded since. It does not ask the
        store."""

    @property
    def why_down(self) -> str:
        """Returns where the store is and why it could not be reached, for a log line. It has no password."""
        return ""

    @abstractmethod
    async def probe(self) -> None:
        """Writes something that changes nothing, to find out whether a store that could not be reached can be written
        again."""

    @abstractmethod
    async def upgrade(self) -> None:
        """Lists and counts what an earlier version has stored, with an empty owner. Other calls may go on meanwhile."""

    @property
    def responses(self) -> ResponseStore | None:
        """Returns the store of responses, if there is one."""
        return None

    @property
    def deliveries(self) -> DeliveryStore | None:
        """Returns the store of deliveries, if there is one."""
        return None

    # ---- files ----

    @abstractmethod
    async def put_chunk(
        self, file_id: FileId, owner: str, number: int, data: bytes, is_bounded: bool = True
    ) -> None:
        """Stores a chunk of a file that is not committed yet. Raises StoreFull if it `is_bounded`."""

    @abstractmethod
    async def reserve(self, file_id: FileId, owner: str, num_bytes: int, is_bounded: bool = True) -> None:
        """Makes room for so many bytes in all of a file that is not committed yet and whose content is apart. Raises
        StoreFull if it `is_bounded`."""

    @abstractmethod
    async def forgotten(self, file_ids: Sequence[FileId]) -> list[FileId]:
        """Returns those of the ids which no file has whose content is apart, and for which there is no room either. An
        id that is forgotten stays so, unless its content is still being written."""

    @abstractmethod
    async def identity(self) -> str:
        """Returns the store's own name, which no other store has."""

    @abstractmethod
    async def commit_file(self, file: FileRecord) -> None:
        """Makes the file exist, with the chunks that were put, or the room that was made. Raises ValueError when these
        have been deleted."""

    @abstractmethod
    async def drop_chunks(self, file_id: FileId) -> None:
        """Deletes the chunks of a file that will not be committed, or the room for them; does nothing if it was
        committed."""

    @abstractmethod
    async def drop_lapsed(self, now: float) -> None:
        """Does `drop_chunks` for some of the files which were not committed and had their last chunk long ago."""

    @abstractmethod
    async def file(self, file_id: FileId) -> FileRecord | None: ...

    @abstractmethod
    async def files(self, file_ids: Sequence[FileId]) -> list[FileRecord]:
        """Returns those of the files that exist."""

    @abstractmethod
    async def chunk(self, file_id: FileId, number: int) -> bytes | None:
        """Returns the chunk; None: the file is gone."""

    @abstractmethod
    async def delete_file(self, file_id: FileId) -> Literal["deleted", "absent", "in_use"]:
        """Deletes the file; "in_use": it is the input of a job that is not over, and stays."""

    @abstractmethod
    async def list_files(
        self, owner: str | None, purpose: Purpose | None, after: FileId | None, limit: int, order: Order
    ) -> Page | None:
        """Lists an owner's files, or all (None), by age. Returns None if there is no file `after`."""

    @abstractmethod
    async def expired_files(self, now: float) -> list[FileId]:
        """Returns some of the files that have expired and may be deleted."""

    # ---- jobs ----

    @abstractmethod
    async def add_job(self, job: JobRecord) -> bool:
        """Adds the job; returns False if its input file was uploaded and does not exist. Raises TooManyJobs and
        StoreFull."""

    @abstractmethod
    async def job(self, job_id: JobId) -> JobRecord | None: ...

    @abstractmethod
    async def tally(self, job_id: JobId) -> Tally: ...

    @abstractmethod
    async def jobs(self, job_ids: Sequence[JobId]) -> list[tuple[JobRecord, Tally]]:
        """Returns those of the jobs that exist, in this order, each with its tally; all in one round trip."""

    @abstractmethod
    async def list_jobs(
        self,
        owner: str | None,
        after: JobId | None,
        limit: int,
        order: Order = "desc",
        of_messages: bool = False,
    ) -> Page | None:
        """Lists an owner's jobs, or all (None), by age; with `of_messages`, message batches alone. Returns None if
        there is no job `after`, and was none in the last PLACE_KEPT_S seconds."""

    @abstractmethod
    async def delete_job(self, job: JobRecord) -> bool:
        """Deletes the job, but none of its files. Returns False if it is not over. Safe to repeat."""

    @abstractmethod
    async def open_jobs(self, stage: Stage, limit: int) -> list[JobId]:
        """Returns jobs in this stage, the most urgent first."""

    @abstractmethod
    async def count_open(self) -> Counter[str]:
        """Returns the number of jobs that are not over, by status."""

    @abstractmethod
    async def replace_job(self, old: JobRecord, new: JobRecord, lease: Lease | None) -> bool:
        """Replaces the job; returns False if it is not `old` any more. `lease` is the holder's (LeaseLost is raised if
        it was lost); None for other callers. When the job is over after this, its lease, its results and its hold on
        the input file are deleted."""

    # ---- what was learned ----

    @abstractmethod
    async def put_state(self, name: str, data: bytes) -> None:
        """Stores the bytes under this name, in place of what was there."""

    @abstractmethod
    async def state(self, name: str) -> bytes | None: ...

    # ---- leases ----

    @abstractmethod
    async def take(self, stage: Stage, holder: str, seconds: float, now: float, count: int) -> list[Lease]:
        """Takes the leases of at most `count` jobs in this stage which nobody holds, the most urgent first. A job
        whose deadline is before `now` is in the stage "end", whether it has run or not. `holder` is for people to
        read."""

    @abstractmethod
    async def renew(self, leases: Sequence[Lease], seconds: float) -> list[LeaseState]: ...

    @abstractmethod
    async def release(self, lease: Lease) -> None:
        """Releases the lease, and marks lines that have begun and have no result as stopped. Does nothing when the
        lease is lost."""

    # ---- results ----

    @abstractmethod
    async def begin_lines(self, lease: Lease, lines: Sequence[int]) -> None:
        """Records that the lines begin; this is called before they run. Raises LeaseLost."""

    @abstractmethod
    async def falls(self, job_id: JobId) -> dict[int, int]:
        """Returns how often a line had begun and had no result when another holder took the job without a release by
        the one before: the line may have killed that gateway."""

    @abstractmethod
    async def put_result(
        self, lease: Lease, owner: str, line: int, result: LineResult, is_bounded: bool = True
    ) -> None:
        """Stores the line's first result; later ones are ignored. Raises LeaseLost, and StoreFull if it
        `is_bounded`."""

    @abstractmethod
    async def lines_done(self, job_id: JobId) -> set[int]: ...

    @abstractmethod
    async def results(self, job_id: JobId, lines: Sequence[int]) -> list[LineResult | None]:
        """Returns the results of the first lines, at least one and as many as have some MiB together."""

    @abstractmethod
    async def finish_job(
        self,
        old: JobRecord,
        new: JobRecord,
        lease: Lease,
        files: Sequence[FileRecord],
        deliveries: Sequence[Delivery] = (),
    ) -> bool:
        """Does `replace_job`, commits `files` and stores `deliveries`, in one step. Returns False too if the content of
        a file has been deleted."""
