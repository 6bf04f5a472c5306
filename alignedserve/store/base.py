"""The interface of the store.

A change is durable when its call returns. Every method raises StoreAway if the store can't be reached; it is then
unknown whether the change was made. Every method may be repeated.

A file or job has an owner, which is a string. The store lists and counts by owner. Access is checked
by the store's callers. The stored bytes are limited in total and per owner (StoreLimits).

The content of a file is either in the store, in chunks, or outside, in a directory or bucket (contents.py). The store
counts the bytes of outside content from before its first byte is written until its file is deleted.

The holder of a job's lease works on the job. Its writes take effect only while it holds the lease, which the store
checks atomically. So a holder that has lost it without noticing changes nothing. Any gateway can take an expired lease.
Until one does, the old holder keeps it: being slow costs nothing.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from alignedserve.store.deliveries import Delivery, DeliveryStore
from alignedserve.store.records import (
    MESSAGE_BATCH,
    FileId,
    FileRecord,
    JobId,
    JobRecord,
    Lease,
    Leases,
    LineResult,
    Order,
    Tally,
)
from alignedserve.store.responses import ResponseStore

# Seconds after its last chunk until an uncommitted file is deleted.
UNCOMMITTED_S = 3600
# Seconds for which a deleted job's position is remembered, for clients that are listing jobs page by page.
PLACE_KEPT_S = 3600
# Records that are deleted in one step, while other calls wait.
NUM_AT_A_TIME = 64
# The most bytes of results that are fetched at once.
RESULT_BYTES = 4 << 20

# The next stage of an open job: validate its file, answer its lines, or end it.
Stage = Literal["validate", "run", "end"]
STAGES: tuple[Stage, ...] = ("validate", "run", "end")
# Statuses of open jobs, and of the jobs in each stage.
OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")
STATUSES: dict[Stage, tuple[str, ...]] = {
    "validate": ("validating",),
    "run": ("in_progress",),
    "end": ("cancelling", "finalizing"),
}


class StoreFull(Exception):
    """There is no room. The message is for the client."""


class TooManyJobs(Exception):
    """The limit of open jobs is reached. The message is for the client."""


@dataclass(frozen=True)
class StoreLimits:
    """Limits on stored data. None means no limit."""

    # The most bytes of files, results and jobs together: in total, and per owner.
    max_bytes: int | None = None
    max_bytes_of_owner: int | None = None
    # The most open jobs: in total, and per owner.
    max_open_jobs: int | None = None
    max_open_jobs_of_owner: int | None = None
    # When an owner has more jobs than this, its oldest ended jobs are deleted.
    max_jobs_of_owner: int = 2000
    # The most bytes of content outside the store: in total, and per owner.
    max_bytes_apart: int | None = None
    max_bytes_apart_of_owner: int | None = None

    def full(self, is_owners: bool, is_apart: bool = False) -> StoreFull:
        """Returns the error for exceeding the limit of bytes: the owner's, or the total."""
        things = "files" if is_apart else "files and batches"
        if is_owners:
            limit = self.max_bytes_apart_of_owner if is_apart else self.max_bytes_of_owner
            return StoreFull(f"{things}: yours may have {limit} bytes; delete some")
        limit = self.max_bytes_apart if is_apart else self.max_bytes
        return StoreFull(f"{things}: all together may have {limit} bytes; delete some")

    def too_many_jobs(self, is_owners: bool) -> TooManyJobs:
        """Returns the error for one more open job: the owner's limit, or the total."""
        if is_owners:
            return TooManyJobs(f"you have {self.max_open_jobs_of_owner} open batches, which is the limit")
        return TooManyJobs(f"there are {self.max_open_jobs} open batches, which is the limit")


@dataclass(frozen=True)
class Page:
    """A page of a list of ids, in order."""

    ids: list[str]
    has_more: bool


@dataclass(frozen=True)
class Listing:
    """A list of files or jobs, and which part of it is asked for."""

    # `files`, `files:PURPOSE`, `jobs`, or `jobs:messages` for message batches only.
    name: str
    # None: everyone's.
    owner: str | None
    # The id before the page; None: the page is the first.
    after: str | None
    limit: int
    # By age.
    order: Order = "desc"

    @property
    def newest_first(self) -> bool:
        return self.order == "desc"

    def page(self, found: Sequence[str]) -> Page:
        """Returns the page that begins with these ids."""
        return Page([*found[: self.limit]], has_more=len(found) > self.limit)

    def had(self, owner: str) -> bool:
        """Returns whether the job `after`, which was this owner's, was in this list before it was deleted."""
        return self.owner in (None, owner) and self.name in job_lists(str(self.after))


def job_lists(job_id: str) -> list[str]:
    """Returns the names of the lists that contain a job until it is deleted."""
    return ["jobs", "jobs:messages"] if job_id.startswith(MESSAGE_BATCH) else ["jobs"]


def due_in(stage: Stage, now: float) -> list[tuple[str, float]]:
    """Returns the statuses of jobs that can be taken in this stage, each with the latest deadline."""
    late = [("in_progress", now)] if stage == "end" else []
    return [*((status, math.inf) for status in STATUSES[stage]), *late]


class Store(Leases):
    @abstractmethod
    async def close(self) -> None: ...

    @property
    @abstractmethod
    def is_down(self) -> bool:
        """Whether a call has failed to reach the store and no probe has succeeded since. Does not contact the store."""

    @property
    def why_down(self) -> str:
        """Returns where the store is and why it could not be reached, for a log line. It has no password."""
        return ""

    @abstractmethod
    async def probe(self) -> None:
        """Makes a write without effect, to find out whether an unreachable store accepts writes again."""

    @abstractmethod
    async def upgrade(self) -> None:
        """Lists and counts data of earlier versions, under an empty owner. Other calls may run meanwhile."""

    @property
    def responses(self) -> ResponseStore | None:
        """Returns the store of responses, or None."""
        return None

    @property
    def deliveries(self) -> DeliveryStore | None:
        """Returns the store of deliveries, or None."""
        return None

    @abstractmethod
    async def page(self, listing: Listing) -> Page | None:
        """Returns a page of files or jobs. None: `after` is not in this list, and no job that was deleted from it in
        the last PLACE_KEPT_S seconds."""

    # ---- files ----

    @abstractmethod
    async def put_chunk(
        self, file_id: FileId, owner: str, number: int, data: bytes, is_bounded: bool = True
    ) -> None:
        """Stores a chunk of an uncommitted file. Raises StoreFull if it `is_bounded`."""

    @abstractmethod
    async def reserve(self, file_id: FileId, owner: str, num_bytes: int, is_bounded: bool = True) -> None:
        """Reserves `num_bytes` bytes in total for an uncommitted file with outside content. Raises StoreFull if it
        `is_bounded`."""

    @abstractmethod
    async def forgotten(self, file_ids: Sequence[FileId]) -> list[FileId]:
        """Returns the ids that belong to no file with outside content and have no reservation. A forgotten id stays
        forgotten, unless its content is still being written."""

    @abstractmethod
    async def identity(self) -> str:
        """Returns the store's unique name."""

    @abstractmethod
    async def commit_file(self, file: FileRecord) -> None:
        """Makes the file exist, with its chunks or its reservation. Raises ValueError if these have been deleted."""

    @abstractmethod
    async def drop_chunks(self, file_id: FileId) -> None:
        """Deletes the chunks or the reservation of a file that will not be committed. Does nothing if it was
        committed."""

    @abstractmethod
    async def drop_lapsed(self, now: float) -> None:
        """Does `drop_chunks` for some uncommitted files that received their last chunk long ago."""

    @abstractmethod
    async def file(self, file_id: FileId) -> FileRecord | None: ...

    @abstractmethod
    async def files(self, file_ids: Sequence[FileId]) -> list[FileRecord]:
        """Returns those of the files that exist."""

    @abstractmethod
    async def chunk(self, file_id: FileId, number: int) -> bytes | None:
        """Returns the chunk; None if the file is gone."""

    @abstractmethod
    async def delete_file(self, file_id: FileId) -> Literal["deleted", "absent", "in_use"]:
        """Deletes the file. "in_use": it is the input of an open job and stays."""

    @abstractmethod
    async def expired_files(self, now: float) -> list[FileId]:
        """Returns some expired files that may be deleted."""

    # ---- jobs ----

    @abstractmethod
    async def add_job(self, job: JobRecord) -> bool:
        """Adds the job. Returns False if it needs an uploaded file that does not exist. Raises TooManyJobs and
        StoreFull."""

    @abstractmethod
    async def job(self, job_id: JobId) -> JobRecord | None: ...

    @abstractmethod
    async def tally(self, job_id: JobId) -> Tally: ...

    @abstractmethod
    async def jobs(self, job_ids: Sequence[JobId]) -> list[tuple[JobRecord, Tally]]:
        """Returns the existing ones of these jobs, in this order, each with its tally; in one round trip."""

    @abstractmethod
    async def delete_job(self, job: JobRecord) -> bool:
        """Deletes the job, but none of its files. Returns False if it is open. Safe to repeat."""

    @abstractmethod
    async def open_jobs(self, stage: Stage, limit: int) -> list[JobId]:
        """Returns jobs in this stage, the most urgent first."""

    @abstractmethod
    async def count_open(self) -> Counter[str]:
        """Returns the number of open jobs by status."""

    @abstractmethod
    async def replace_job(
        self,
        old: JobRecord,
        new: JobRecord,
        lease: Lease | None,
        files: Sequence[FileRecord] = (),
        deliveries: Sequence[Delivery] = (),
    ) -> bool:
        """Atomically replaces the job, commits `files` and stores `deliveries`. Returns False if the job is not `old`
        any more, or the content of a file has been deleted. The holder passes its `lease` (raises LeaseLost if that was
        lost); other callers pass None. If the job has ended after this, its lease, its results and its hold on the
        input file are deleted."""

    # ---- what was learned ----

    @abstractmethod
    async def put_state(self, name: str, data: bytes) -> None:
        """Stores the bytes under this name, replacing earlier ones."""

    @abstractmethod
    async def state(self, name: str) -> bytes | None: ...

    # ---- leases ----

    @abstractmethod
    async def take(self, stage: Stage, holder: str, seconds: float, now: float, count: int) -> list[Lease]:
        """Takes the leases of at most `count` unleased jobs in this stage, the most urgent first. A job with its
        deadline before `now` is in the stage "end", whether or not it has run. `holder` is a name for people to
        read."""

    # ---- results ----

    @abstractmethod
    async def begin_lines(self, lease: Lease, lines: Sequence[int]) -> None:
        """Records that these lines begin. Call it before they run. Raises LeaseLost."""

    @abstractmethod
    async def falls(self, job_id: JobId) -> dict[int, int]:
        """Returns, per line, how often it was running when another holder took the job over without a release: the line
        may have crashed that gateway."""

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
        """Returns the results of the first lines: at least one, and as many as fit in some MiB."""
