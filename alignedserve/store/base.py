"""The interface to the store.

Everything is durable when the call returns. Every method raises StoreAway when the store can't be reached; whether the
change has happened then is not known, and all of them may be repeated: what is there already stays as it is.

A file and a job have an owner, which is a text. The store lists and counts by it; whether somebody may see what another
one owns is decided by whoever asks. What is stored is bounded (StoreLimits), in all and for each owner.

A job is worked on by whoever holds its lease. Whatever a holder writes is written only while it still holds it, which
the store checks in the same step: one that has lost it, and does not know yet, changes nothing. A lease that has lapsed
is anybody's to take, and until somebody does it is its holder's still: to be slow costs nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from alignedserve.store.records import FileId, FileRecord, JobId, JobRecord, LineResult, Purpose, Tally

# Data of a file that was never committed goes after so long without another chunk.
UNCOMMITTED_S = 3600

Order = Literal["asc", "desc"]
# What open jobs need next: a look at their file, answers to their lines, or to be brought to an end.
Stage = Literal["validate", "run", "end"]
STAGES: tuple[Stage, ...] = ("validate", "run", "end")


class StoreAway(Exception):
    """The store can't be reached now."""


class LeaseLost(Exception):
    """The job is somebody else's by now, or nobody's."""


class StoreFull(Exception):
    """What was to be stored is more than there may be. The message is for whoever sent it."""


class TooManyJobs(Exception):
    """As many jobs are open as there may be. The message is for whoever wants another."""


@dataclass(frozen=True)
class StoreLimits:
    """None: there is no limit."""

    # of files, results and jobs together: in all, and of each owner
    max_bytes: int | None = None
    max_bytes_of_owner: int | None = None
    # jobs that are not over: in all, and of each owner
    max_open_jobs: int | None = None
    max_open_jobs_of_owner: int | None = None
    # of each owner: when there are more jobs, the oldest that are over are forgotten
    max_jobs_of_owner: int = 2000


@dataclass(frozen=True)
class Lease:
    job_id: JobId
    # of a job, no two leases ever have the same
    token: str


# what has become of one
LeaseState = Literal["lost", "held", "cancelling"]


@dataclass(frozen=True)
class Page:
    """Some ids of a listing, in order."""

    ids: list[str]
    has_more: bool


class Store(ABC):
    @abstractmethod
    async def close(self) -> None: ...

    @property
    @abstractmethod
    def is_down(self) -> bool:
        """It could not be reached, and no probe has come through since. Asks nothing."""

    @abstractmethod
    async def probe(self) -> None:
        """Writes something that changes nothing: whether it can, after it could not be reached."""

    @abstractmethod
    async def upgrade(self) -> None:
        """What an earlier version has stored is listed and counted, as nobody's. Beside all else."""

    # ---- files ----

    @abstractmethod
    async def put_chunk(
        self, file_id: FileId, owner: str, number: int, data: bytes, is_bounded: bool = True
    ) -> None:
        """Of a file that is not committed yet. Raises StoreFull, unless it is not `is_bounded`."""

    @abstractmethod
    async def commit_file(self, file: FileRecord) -> None:
        """From here on it is there, with the chunks that were put. Raises ValueError when they have gone."""

    @abstractmethod
    async def drop_chunks(self, file_id: FileId) -> None:
        """It will not be committed; if it was, nothing happens."""

    @abstractmethod
    async def drop_lapsed(self, now: float) -> None:
        """Data of files that were not committed, and had their last chunk long ago. Some of it."""

    @abstractmethod
    async def file(self, file_id: FileId) -> FileRecord | None: ...

    @abstractmethod
    async def files(self, file_ids: Sequence[FileId]) -> list[FileRecord]:
        """Those that are there."""

    @abstractmethod
    async def chunk(self, file_id: FileId, number: int) -> bytes | None:
        """None: the file is gone."""

    @abstractmethod
    async def delete_file(self, file_id: FileId) -> Literal["deleted", "absent", "in_use"]:
        """`in_use`: it is the input of a job that is not over."""

    @abstractmethod
    async def list_files(
        self, owner: str | None, purpose: Purpose | None, after: FileId | None, limit: int, order: Order
    ) -> Page | None:
        """An owner's, or all (None), by age. None: there is no file `after`."""

    @abstractmethod
    async def expired_files(self, now: float) -> list[FileId]:
        """They may be deleted. Some of them."""

    # ---- jobs ----

    @abstractmethod
    async def add_job(self, job: JobRecord) -> bool:
        """False: its input file is not there. Raises TooManyJobs and StoreFull."""

    @abstractmethod
    async def job(self, job_id: JobId) -> JobRecord | None: ...

    @abstractmethod
    async def tally(self, job_id: JobId) -> Tally: ...

    @abstractmethod
    async def list_jobs(self, owner: str | None, after: JobId | None, limit: int) -> Page | None:
        """An owner's, or all (None), newest first. None: there is no job `after`."""

    @abstractmethod
    async def count_open(self) -> Counter[str]:
        """Jobs that are not over, by status."""

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
    async def take(self, stage: Stage, holder: str, seconds: float, now: float, count: int) -> list[Lease]:
        """Of jobs in this stage whose lease nobody holds, the most urgent first, `count` at most. One whose time was
        up `now` is to be brought to an end, whether it has run or not. `holder`: for people to read."""

    @abstractmethod
    async def renew(self, leases: Sequence[Lease], seconds: float) -> list[LeaseState]: ...

    @abstractmethod
    async def release(self, lease: Lease) -> None:
        """Lines that have begun and have no result have been stopped. Nothing happens when it is lost."""

    # ---- results ----

    @abstractmethod
    async def begin_lines(self, lease: Lease, lines: Sequence[int]) -> None:
        """Before they run. Raises LeaseLost."""

    @abstractmethod
    async def falls(self, job_id: JobId) -> dict[int, int]:
        """How often a line had begun, and had no result, when its holder was followed by another one without having
        released the lease: the line may be what brought it down."""

    @abstractmethod
    async def put_result(
        self, lease: Lease, owner: str, line: int, result: LineResult, is_bounded: bool = True
    ) -> None:
        """The first one of a line counts. Raises LeaseLost, and StoreFull unless it is not `is_bounded`."""

    @abstractmethod
    async def lines_done(self, job_id: JobId) -> set[int]: ...

    @abstractmethod
    async def results(self, job_id: JobId, lines: Sequence[int]) -> list[LineResult | None]:
        """Of as many of the lines as fit some MiB, from the first on: one at least."""

    @abstractmethod
    async def finish_job(
        self, old: JobRecord, new: JobRecord, lease: Lease, files: Sequence[FileRecord]
    ) -> bool:
        """replace_job, and `files` are committed in the same step."""
