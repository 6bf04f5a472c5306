"""A store in memory, with exactly the semantics of the one on Redis (alignedserve/store/redis_store.py).

Each method does in one step what the script of the same name does. A property test makes the same calls to both.
Records are kept as bytes: a record is only replaced if it still has the bytes that were read, and the limits count
bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec

from alignedserve.store.base import (
    NUM_AT_A_TIME,
    OPEN_STATUSES,
    PLACE_KEPT_S,
    RESULT_BYTES,
    STATUSES,
    UNCOMMITTED_S,
    Listing,
    Page,
    Stage,
    Store,
    StoreLimits,
    due_in,
    job_lists,
)
from alignedserve.store.deliveries import Delivery
from alignedserve.store.records import (
    FileId,
    FileRecord,
    JobId,
    JobRecord,
    Lease,
    LeaseState,
    LineResult,
    Tally,
)
from alignedserve.vopr.front_end.listings import Listings
from alignedserve.vopr.front_end.ranked import Ranked
from alignedserve.vopr.front_end.stored_bytes import StoredBytes

Record = TypeVar("Record", bound=msgspec.Struct)


@dataclass
class _StoredFile:
    """A file's chunks by number, or the number of reserved bytes, and its record after it is committed."""

    chunks: dict[int, bytes] = field(default_factory=dict)
    num_bytes_apart: int | None = None
    record: bytes = b""
    # The open jobs that read it.
    uses: set[JobId] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.chunks.values()))

    def is_whole(self, record: FileRecord) -> bool:
        if record.is_apart:
            return self.num_bytes_apart == record.num_bytes
        return len(self.chunks) == record.num_chunks


@dataclass
class _HeldJob:
    record: bytes
    tally: Counter[str] = field(default_factory=Counter)
    # The token of its last holder, and when the lease lapses.
    holder: str | None = None
    lapses_s: float = 0.0
    # The lines that have begun and have no result, and how often each line has fallen.
    running: set[int] = field(default_factory=set)
    falls: Counter[int] = field(default_factory=Counter)
    results: dict[int, bytes] = field(default_factory=dict)

    def let_go(self) -> None:
        self.holder, self.lapses_s = None, 0.0
        self.running.clear()


@dataclass
class _Place:
    """Where a deleted job was listed, and when that is forgotten."""

    score: float
    owner: str
    lapses_at: float


class MemoryStore(Store):
    def __init__(self, clock: Callable[[], float], limits: StoreLimits | None = None) -> None:
        """`clock` returns seconds since 1970."""
        self._clock = clock
        self._limits = limits or StoreLimits()
        self._files: defaultdict[str, _StoredFile] = defaultdict(_StoredFile)
        self._jobs: dict[str, _HeldJob] = {}
        self._states: dict[str, bytes] = {}
        self._bytes = StoredBytes(self._limits)
        self._bytes_apart = StoredBytes(self._limits, is_apart=True)
        # Uncommitted files by the time at which they lapse, and their owners.
        self._uploads = Ranked()
        self._uploaders: dict[str, str] = {}
        # The ids in each listing: files, the files of a purpose, jobs, message batches, and open jobs; each also per
        # owner.
        self._listings = Listings()
        self._expiring = Ranked()
        # The places of deleted jobs.
        self._places: dict[JobId, _Place] = {}
        self._sequence = 0

    async def close(self) -> None:
        return

    @property
    def is_down(self) -> bool:
        return False

    async def probe(self) -> None:
        return

    async def upgrade(self) -> None:
        """Does nothing: there is no earlier version."""

    def num_bytes(self, owner: str) -> int:
        """Returns the bytes stored for the owner, as the limits count them."""
        return self._bytes.of(owner)

    def num_bytes_apart(self, owner: str) -> int:
        """Returns the same for content that is kept apart."""
        return self._bytes_apart.of(owner)

    async def page(self, listing: Listing) -> Page | None:
        place = self._places.get(JobId(listing.after)) if listing.after else None
        if place is None or self._clock() >= place.lapses_at:
            return self._listings.page(listing)
        return self._listings.page_from(listing, place.score) if listing.had(place.owner) else None

    # ---- files ----

    async def put_chunk(
        self, file_id: FileId, owner: str, number: int, data: bytes, is_bounded: bool = True
    ) -> None:
        old = self._files[file_id].chunks.get(number, b"") if file_id in self._files else b""
        self._bytes.add_if_room(owner, len(data) - len(old), is_bounded)
        self._files[file_id].chunks[number] = data
        self._uploads.put(file_id, int(self._clock()) + UNCOMMITTED_S)
        self._uploaders[file_id] = owner

    async def reserve(self, file_id: FileId, owner: str, num_bytes: int, is_bounded: bool = True) -> None:
        old = self._files[file_id].num_bytes_apart if file_id in self._files else None
        self._bytes_apart.add_if_room(owner, num_bytes - (old or 0), is_bounded)
        self._files[file_id].num_bytes_apart = num_bytes
        self._uploads.put(file_id, int(self._clock()) + UNCOMMITTED_S)
        self._uploaders[file_id] = owner

    async def forgotten(self, file_ids: Sequence[FileId]) -> list[FileId]:
        kept = {file_id for file_id, file in self._files.items() if file.num_bytes_apart is not None}
        return [each for each in file_ids if each not in kept]

    async def identity(self) -> str:
        return "memory"

    async def commit_file(self, file: FileRecord) -> None:
        if not self._is_whole(file):
            raise ValueError(f"file {file.id}: not all of its {file.num_chunks} chunks are there")
        self._commit(file)

    async def drop_chunks(self, file_id: FileId) -> None:
        self._drop(file_id)

    async def drop_lapsed(self, now: float) -> None:
        for file_id in self._uploads.up_to(now)[:NUM_AT_A_TIME]:
            self._drop(file_id)

    async def file(self, file_id: FileId) -> FileRecord | None:
        record = self._files[file_id].record if file_id in self._files else b""
        return _decoded(record, FileRecord) if record else None

    async def files(self, file_ids: Sequence[FileId]) -> list[FileRecord]:
        found = [await self.file(each) for each in file_ids]
        return [each for each in found if each]

    async def chunk(self, file_id: FileId, number: int) -> bytes | None:
        return self._files[file_id].chunks.get(number) if file_id in self._files else None

    async def delete_file(self, file_id: FileId) -> Literal["deleted", "absent", "in_use"]:
        record = await self.file(file_id)
        if record is None:
            return "absent"
        file = self._files[file_id]
        if file.uses:
            return "in_use"
        self._bytes.add(record.owner, -len(file.record) - file.num_bytes)
        self._bytes_apart.add(record.owner, -(file.num_bytes_apart or 0))
        for listing in self._listings.each("files", f"files:{record.purpose}", owner=record.owner):
            listing.remove(file_id)
        self._expiring.remove(file_id)
        del self._files[file_id]
        return "deleted"

    async def expired_files(self, now: float) -> list[FileId]:
        return [FileId(each) for each in self._expiring.up_to(now)[:NUM_AT_A_TIME]]

    # ---- jobs ----

    async def add_job(self, job: JobRecord) -> bool:
        if job.id in self._jobs:
            return True
        input_id = FileId(job.stored_input_id)
        if input_id and await self.file(input_id) is None:
            return False
        self._check_jobs(job.owner)
        record = msgspec.msgpack.encode(job)
        self._bytes.add_if_room(job.owner, len(record))
        self._jobs[job.id] = _HeldJob(record)
        self._places.pop(job.id, None)
        score = self._next()
        for listing in self._job_listings(job.id, job.owner):
            listing.put(job.id, score)
        for listing in self._listings.each("open", owner=job.owner):
            listing.put(job.id, job.expires_at)
        self._place(job.id, job.status, job.expires_at)
        if input_id:
            self._files[input_id].uses.add(job.id)
        self._forget_old_jobs(job.owner)
        return True

    async def job(self, job_id: JobId) -> JobRecord | None:
        return _decoded(self._jobs[job_id].record, JobRecord) if job_id in self._jobs else None

    async def tally(self, job_id: JobId) -> Tally:
        return Tally(**self._jobs[job_id].tally) if job_id in self._jobs else Tally()

    async def jobs(self, job_ids: Sequence[JobId]) -> list[tuple[JobRecord, Tally]]:
        found = [(await self.job(each), await self.tally(each)) for each in job_ids]
        return [(job, tally) for job, tally in found if job]

    async def delete_job(self, job: JobRecord) -> bool:
        if job.id in self._listings["open"]:
            return False
        if job.id in self._jobs:
            self._forget(job.id, job.owner)
        return True

    async def open_jobs(self, stage: Stage, limit: int) -> list[JobId]:
        found = [each for status in STATUSES[stage] for each in self._listings[f"open:{status}"].ids()]
        return [JobId(each) for each in found[:limit]]

    async def count_open(self) -> Counter[str]:
        found = {status: len(self._listings[f"open:{status}"]) for status in OPEN_STATUSES}
        return Counter({status: count for status, count in found.items() if count})

    async def replace_job(
        self,
        old: JobRecord,
        new: JobRecord,
        lease: Lease | None,
        files: Sequence[FileRecord] = (),
        deliveries: Sequence[Delivery] = (),
    ) -> bool:
        """Ignores `deliveries`: this store has none."""
        if lease and not self._is_held(Lease(new.id, lease.token)):
            raise lease.lost()
        before, after = msgspec.msgpack.encode(old), msgspec.msgpack.encode(new)
        job = self._jobs.get(new.id)
        if job is None or job.record != before or not all(map(self._is_whole, files)):
            return False
        self._bytes.add(new.owner, len(after) - len(before))
        job.record = after
        self._place(new.id, new.status, new.expires_at)
        if new.is_over:
            self._end(job, new)
        for file in files:
            self._commit(file)
        return True

    # ---- learned state ----

    async def put_state(self, name: str, data: bytes) -> None:
        self._states[name] = data

    async def state(self, name: str) -> bytes | None:
        return self._states.get(name)

    # ---- leases ----

    async def take(self, stage: Stage, holder: str, seconds: float, now: float, count: int) -> list[Lease]:
        leases: list[Lease] = []
        for status, due_by in due_in(stage, now):
            due = self._listings[f"open:{status}"].up_to(due_by)
            if len(leases) < count and due:
                token = f"{self._next()}:{holder}"
                free = [JobId(each) for each in due if self._jobs[JobId(each)].lapses_s < self._clock()]
                leases += [self._taken(each, token, seconds) for each in free[: count - len(leases)]]
        return leases

    async def renew(self, leases: Sequence[Lease], seconds: float) -> list[LeaseState]:
        return [self._renewed(lease, seconds) for lease in leases]

    async def release(self, lease: Lease) -> None:
        if self._is_held(lease):
            self._jobs[lease.id].let_go()

    # ---- results ----

    async def begin_lines(self, lease: Lease, lines: Sequence[int]) -> None:
        self._held(lease).running.update(lines)

    async def falls(self, job_id: JobId) -> dict[int, int]:
        return dict(self._jobs[job_id].falls) if job_id in self._jobs else {}

    async def put_result(
        self, lease: Lease, owner: str, line: int, result: LineResult, is_bounded: bool = True
    ) -> None:
        job, text = self._held(lease), msgspec.msgpack.encode(result)
        if line not in job.results:
            self._bytes.add_if_room(owner, len(text), is_bounded)
            job.results[line] = text
            job.tally["num_failed" if result.is_error else "num_completed"] += 1
            for name in ("num_input_tokens", "num_output_tokens", "num_cached_tokens", "num_line_bytes"):
                job.tally[name] += getattr(result, name)
            if result.ending:
                job.tally[f"num_{result.ending}"] += 1
            job.tally["num_result_bytes"] += len(text)
        job.running.discard(line)

    async def lines_done(self, job_id: JobId) -> set[int]:
        return set(self._jobs[job_id].results) if job_id in self._jobs else set()

    async def results(self, job_id: JobId, lines: Sequence[int]) -> list[LineResult | None]:
        stored = self._jobs[job_id].results if job_id in self._jobs else {}
        found: list[LineResult | None] = []
        num_bytes = 0
        for line in lines:
            text = stored.get(line)
            num_bytes += len(text or b"")
            if found and num_bytes > RESULT_BYTES:
                break
            found.append(None if text is None else _decoded(text, LineResult))
        return found

    # ---- implementation ----

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _check_jobs(self, owner: str) -> None:
        limits, num_own = self._limits, len(self._listings.owned_by(owner, "open"))
        if limits.max_open_jobs_of_owner is not None and num_own >= limits.max_open_jobs_of_owner:
            raise limits.too_many_jobs(is_owners=True)
        if limits.max_open_jobs is not None and len(self._listings["open"]) >= limits.max_open_jobs:
            raise limits.too_many_jobs(is_owners=False)

    def _drop(self, file_id: str) -> None:
        """Deletes the chunks of an uncommitted file."""
        file = self._files.get(file_id)
        if file is not None and file.record:
            return
        owner = self._uploaders.pop(file_id, None)
        if file is not None and owner is not None:
            self._bytes.add(owner, -file.num_bytes)
            self._bytes_apart.add(owner, -(file.num_bytes_apart or 0))
        self._files.pop(file_id, None)
        self._uploads.remove(file_id)

    def _is_whole(self, file: FileRecord) -> bool:
        return (self._files[file.id] if file.id in self._files else _StoredFile()).is_whole(file)

    def _commit(self, file: FileRecord) -> None:
        kept, record = self._files[file.id], msgspec.msgpack.encode(file)
        self._bytes.add(file.owner, len(record) - len(kept.record))
        kept.record = record
        self._uploads.remove(file.id)
        self._uploaders.pop(file.id, None)
        score = self._next()
        for listing in self._listings.each("files", f"files:{file.purpose}", owner=file.owner):
            listing.put_new(file.id, score)
        if file.expires_at is not None:
            self._expiring.put(file.id, file.expires_at)

    def _place(self, job_id: JobId, status: str, expires_at: float) -> None:
        """Lists an open job by its status, and no other job."""
        for each in OPEN_STATUSES:
            listing = self._listings[f"open:{each}"]
            listing.put(job_id, expires_at) if each == status else listing.remove(job_id)

    def _forget_old_jobs(self, owner: str) -> None:
        mine = self._listings.owned_by(owner, "jobs")
        num_more = len(mine) - self._limits.max_jobs_of_owner
        for job_id in [JobId(each) for each in mine.ids()[: min(max(num_more, 0), 8)]]:
            if job_id not in self._listings["open"]:
                self._forget(job_id, owner)

    def _forget(self, job_id: JobId, owner: str) -> None:
        score = self._listings["jobs"].score(job_id)
        self._places[job_id] = _Place(score, owner, self._clock() + PLACE_KEPT_S)
        self._bytes.add(owner, -len(self._jobs.pop(job_id).record))
        for listing in self._job_listings(job_id, owner):
            listing.remove(job_id)

    def _job_listings(self, job_id: JobId, owner: str) -> list[Ranked]:
        return self._listings.each(*job_lists(job_id), owner=owner)

    def _end(self, job: _HeldJob, record: JobRecord) -> None:
        for listing in self._listings.each("open", owner=record.owner):
            listing.remove(record.id)
        self._bytes.add(record.owner, -job.tally.pop("num_result_bytes", 0))
        job.results.clear()
        job.falls.clear()
        if record.stored_input_id in self._files:
            self._files[record.stored_input_id].uses.discard(record.id)
        job.let_go()

    def _is_held(self, lease: Lease) -> bool:
        job = self._jobs.get(lease.id)
        return job is not None and job.holder == lease.token

    def _held(self, lease: Lease) -> _HeldJob:
        if not self._is_held(lease):
            raise lease.lost()
        return self._jobs[lease.id]

    def _taken(self, job_id: JobId, token: str, seconds: float) -> Lease:
        job = self._jobs[job_id]
        job.holder, job.lapses_s = token, self._clock() + seconds
        job.falls.update(job.running)
        job.running.clear()
        return Lease(job_id, token)

    def _renewed(self, lease: Lease, seconds: float) -> LeaseState:
        if not self._is_held(lease):
            return "lost"
        self._jobs[lease.id].lapses_s = self._clock() + seconds
        return "cancelling" if lease.id in self._listings["open:cancelling"] else "held"


def _decoded(data: bytes, kind: type[Record]) -> Record:
    return msgspec.msgpack.decode(data, type=kind)
