"""The store on Redis.

All keys have one prefix:

- Files: `file:ID`, a record; `data:ID`, a hash of its chunks by number; `apart`, a hash of the bytes of outside content
  by file; `uses:ID`, open jobs that read it; `uploads`, uncommitted files by expiry; `uploaders`, a hash of their
  owners.
- Jobs: `job:ID`, a record; `place:ID`, a deleted job's position and owner; `results:ID`, a hash by line; `tally:ID`, a
  hash of counts; and the keys of leases (redis_leases.py).
- Counters: `bytes` and `bytes@OWNER`, stored bytes; `bytes-apart` and `bytes-apart@OWNER`, bytes outside the store.
- Others: `state:NAME`, bytes; `identity`, the store's unique name; `format`, the version of this layout.

Listings are sorted sets of ids: `files`, `files:PURPOSE`, `jobs` and `jobs:messages` by age; `open` by deadline; each
also per owner, with the suffix `@OWNER`; `open:STATUS` and `expiring` by deadline.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import msgspec

from alignedserve.store import scripts
from alignedserve.store.base import (
    NUM_AT_A_TIME,
    OPEN_STATUSES,
    RESULT_BYTES,
    STATUSES,
    UNCOMMITTED_S,
    Listing,
    Page,
    Stage,
    Store,
    due_in,
)
from alignedserve.store.deliveries import Delivery, DeliveryStore
from alignedserve.store.records import FileId, FileRecord, JobId, JobRecord, Lease, LineResult, Tally
from alignedserve.store.redis_connection import asks
from alignedserve.store.redis_deliveries import DELIVER, RedisDeliveries, delivery_args
from alignedserve.store.redis_leases import RedisLeases, or_none
from alignedserve.store.redis_responses import RedisResponses
from alignedserve.store.response_scripts import DROP_OLD_RESPONSE
from alignedserve.store.responses import ResponseStore
from alignedserve.store.scripts import PREFIX

# Lines per request. An answer is decoded in one step.
_NUM_LINES = 1024
# The version of the stored layout. Owners came with 2, parts of responses with 3.
FORMAT = b"3"


class RedisStore(RedisLeases, Store):
    @property
    def responses(self) -> ResponseStore:
        return RedisResponses(self)

    @property
    def deliveries(self) -> DeliveryStore:
        return RedisDeliveries(self)

    @asks
    async def ping(self) -> None:
        await self._redis.ping()

    @asks
    async def info(self) -> Mapping[str, Any]:
        """Returns the server's statistics, with the names of Redis's INFO."""
        return cast(Mapping[str, Any], await self._redis.info())

    @asks
    async def page(self, listing: Listing) -> Page | None:
        name = _key(listing.name if listing.owner is None else f"{listing.name}@{listing.owner}")
        start = 0
        if listing.after is not None:
            rank_of = self._redis.zrevrank if listing.newest_first else self._redis.zrank
            rank = await rank_of(name, listing.after)
            if rank is None:
                return await self._page_from_place(name, listing, listing.after)
            start = rank + 1
        found = await self._redis.zrange(name, start, start + listing.limit, desc=listing.newest_first)
        return listing.page([each.decode() for each in found])

    # ---- files ----

    async def put_chunk(
        self, file_id: FileId, owner: str, number: int, data: bytes, is_bounded: bool = True
    ) -> None:
        lapses_at = int(time.time()) + UNCOMMITTED_S
        limits = self.byte_limits(is_bounded)
        await self.done(scripts.PUT_CHUNK, file_id, owner, number, data, lapses_at, *limits)

    async def reserve(self, file_id: FileId, owner: str, num_bytes: int, is_bounded: bool = True) -> None:
        lapses_at = int(time.time()) + UNCOMMITTED_S
        limits = self.byte_limits(is_bounded, is_apart=True)
        await self.done(scripts.RESERVE, file_id, owner, num_bytes, lapses_at, *limits, is_apart=True)

    @asks
    async def forgotten(self, file_ids: Sequence[FileId]) -> list[FileId]:
        found = await self._redis.hmget(_key("apart"), file_ids) if file_ids else []
        return [each for each, size in zip(file_ids, found, strict=True) if size is None]

    @asks
    async def identity(self) -> str:
        await self._redis.set(_key("identity"), secrets.token_hex(8), nx=True)
        return cast(bytes, await self._redis.get(_key("identity"))).decode()

    async def commit_file(self, file: FileRecord) -> None:
        if not await self.run(scripts.COMMIT_FILE, *_file_args(file)):
            raise ValueError(f"file {file.id}: not all of its {file.num_chunks} chunks are there")

    async def drop_chunks(self, file_id: FileId) -> None:
        await self.run(scripts.DROP_CHUNKS, file_id)

    async def drop_lapsed(self, now: float) -> None:
        await self.run(scripts.DROP_LAPSED, now, NUM_AT_A_TIME)

    async def file(self, file_id: FileId) -> FileRecord | None:
        found = await self.get(_key("file", file_id))
        return None if found is None else _decode(found, FileRecord)

    @asks
    async def files(self, file_ids: Sequence[FileId]) -> list[FileRecord]:
        found = await self._redis.mget([_key("file", each) for each in file_ids]) if file_ids else []
        return [_decode(each, FileRecord) for each in found if each is not None]

    async def chunk(self, file_id: FileId, number: int) -> bytes | None:
        return await self.field(_key("data", file_id), str(number))

    async def delete_file(self, file_id: FileId) -> Literal["deleted", "absent", "in_use"]:
        file = await self.file(file_id)
        if file is None:
            return "absent"
        done = await self.run(scripts.DELETE_FILE, file.id, file.owner, file.purpose)
        return cast(Literal["deleted", "absent", "in_use"], done.decode())

    async def expired_files(self, now: float) -> list[FileId]:
        return [FileId(each) for each in await self.due(_key("expiring"), now, NUM_AT_A_TIME)]

    # ---- jobs ----

    async def add_job(self, job: JobRecord) -> bool:
        args = [_encode(job), job.id, job.owner, job.stored_input_id, job.expires_at]
        args += [*self.open_limits(), self.limits.max_jobs_of_owner, job.status]
        return bool(await self.done(scripts.ADD_JOB, *args))

    @asks
    async def job(self, job_id: JobId) -> JobRecord | None:
        found = await self._redis.get(_key("job", job_id))
        return None if found is None else _decode(found, JobRecord)

    @asks
    async def tally(self, job_id: JobId) -> Tally:
        return _tally(await self._redis.hgetall(_key("tally", job_id)))

    @asks
    async def jobs(self, job_ids: Sequence[JobId]) -> list[tuple[JobRecord, Tally]]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.get(_key("job", job_id))
                pipe.hgetall(_key("tally", job_id))
            found = await pipe.execute()
        pairs = zip(found[::2], found[1::2], strict=True)
        return [(_decode(job, JobRecord), _tally(tally)) for job, tally in pairs if job is not None]

    async def delete_job(self, job: JobRecord) -> bool:
        return bool(await self.run(scripts.DELETE_JOB, job.id, job.owner))

    @asks
    async def open_jobs(self, stage: Stage, limit: int) -> list[JobId]:
        found: list[JobId] = []
        for status in STATUSES[stage]:
            ids = await self._redis.zrange(_key("open", status), 0, limit - len(found) - 1)
            found += [JobId(each.decode()) for each in ids]
            if len(found) == limit:
                break
        return found

    @asks
    async def count_open(self) -> Counter[str]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for status in OPEN_STATUSES:
                pipe.zcard(_key("open", status))
            found = await pipe.execute()
        return Counter({status: count for status, count in zip(OPEN_STATUSES, found, strict=True) if count})

    async def replace_job(
        self,
        old: JobRecord,
        new: JobRecord,
        lease: Lease | None,
        files: Sequence[FileRecord] = (),
        deliveries: Sequence[Delivery] = (),
    ) -> bool:
        args: list[Any] = [lease.token if lease else "", new.id, _encode(old), _encode(new), new.owner]
        args += [new.status, int(new.is_over), new.expires_at, new.stored_input_id, len(files)]
        for file in files:
            args += _file_args(file)
        script = DELIVER + scripts.REPLACE_JOB
        return bool(await self.done(script, *args, *delivery_args(deliveries), lease=lease))

    # ---- what was learned ----

    @asks
    async def put_state(self, name: str, data: bytes) -> None:
        await self._redis.set(_key("state", name), data)

    async def state(self, name: str) -> bytes | None:
        return await self.get(_key("state", name))

    # ---- leases ----

    async def take(self, stage: Stage, holder: str, seconds: float, now: float, count: int) -> list[Lease]:
        leases: list[Lease] = []
        for status, due_by in due_in(stage, now):
            leases += await self.take_due(status, due_by, holder, seconds, count - len(leases))
        return leases

    # ---- results ----

    async def begin_lines(self, lease: Lease, lines: Sequence[int]) -> None:
        await self.done(scripts.BEGIN_LINES, lease.token, lease.id, *lines, lease=lease)

    @asks
    async def falls(self, job_id: JobId) -> dict[int, int]:
        found = await self._redis.hgetall(_key("falls", job_id))
        return {int(line): int(count) for line, count in found.items()}

    async def put_result(
        self, lease: Lease, owner: str, line: int, result: LineResult, is_bounded: bool = True
    ) -> None:
        count = "num_failed" if result.is_error else "num_completed"
        tokens = [result.num_input_tokens, result.num_output_tokens, result.num_cached_tokens]
        args = [lease.token, lease.id, line, _encode(result), count, *tokens, owner]
        ending = f"num_{result.ending}" if result.ending else ""
        args += [*self.byte_limits(is_bounded), result.num_line_bytes, ending]
        await self.done(scripts.PUT_RESULT, *args, lease=lease)

    async def lines_done(self, job_id: JobId) -> set[int]:
        done: set[int] = set()
        first = 1
        while True:
            num_done, *lines = await self.run(scripts.LINES_DONE, job_id, first, first + _NUM_LINES - 1)
            done.update(lines)
            if len(done) >= num_done:
                return done
            first += _NUM_LINES

    async def results(self, job_id: JobId, lines: Sequence[int]) -> list[LineResult | None]:
        found = await self.run(scripts.RESULTS, job_id, RESULT_BYTES, *lines) if lines else []
        return [None if each is None else _decode(each, LineResult) for each in found]

    # ---- a store of an earlier version ----

    async def upgrade(self) -> None:
        """Gives files and jobs from before there were owners an empty owner, and counts them. Deletes responses from
        before they had parts. Safe to repeat, and to run beside other calls."""
        # A gateway of an earlier version may add some even after an upgrade.
        for response_id in await self._all("expiring-responses"):
            await self.run(DROP_OLD_RESPONSE, response_id)
        found = await self.get(_key("format"))
        if not found:
            for file_id in await self._all("files"):
                await self._adopt_file(FileId(file_id))
            for job_id in await self._all("jobs"):
                await self._adopt_job(JobId(job_id))
        if found != FORMAT:
            await self.call(self._redis.set(_key("format"), FORMAT))

    @asks
    async def _all(self, listing: str) -> list[str]:
        return [each.decode() for each in await self._redis.zrange(_key(listing), 0, -1)]

    async def _adopt_file(self, file_id: FileId) -> None:
        # Unreadable records are left as they are.
        with contextlib.suppress(msgspec.DecodeError):
            if file := await self.file(file_id):
                await self.run(scripts.ADOPT_FILE, file.id, file.owner, file.purpose)

    async def _adopt_job(self, job_id: JobId) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            if job := await self.job(job_id):
                args = [job.id, job.owner, job.status, int(job.is_over), job.expires_at]
                await self.run(scripts.ADOPT_JOB, *args)

    # ---- how it is done ----

    async def _page_from_place(self, name: str, listing: Listing, after: str) -> Page | None:
        """Returns the page after a deleted job; None if it was not listed, or was deleted too long ago."""
        place = await self._redis.get(_key("place", after))
        score, _, owner = (place or b"").decode().partition(" ")
        if not score or not listing.had(owner):
            return None
        end = "-inf" if listing.newest_first else "+inf"
        found = await self._redis.zrange(
            name, f"({score}", end, desc=listing.newest_first, byscore=True, offset=0, num=listing.limit + 1
        )
        return listing.page([each.decode() for each in found])


def _key(*words: str) -> str:
    return PREFIX + ":".join(words)


def _file_args(file: FileRecord) -> list[Any]:
    num_apart = file.num_bytes if file.is_apart else ""
    args = [_encode(file), file.id, file.owner, file.purpose, or_none(file.expires_at)]
    return [*args, file.num_chunks, num_apart]


def _encode(record: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(record)


Record = TypeVar("Record", bound=msgspec.Struct)


def _decode(data: bytes, kind: type[Record]) -> Record:
    return msgspec.msgpack.decode(data, type=kind)


def _tally(found: Mapping[bytes, bytes]) -> Tally:
    counts = {name.decode(): int(count) for name, count in found.items()}
    # A gateway of a later version may store more counts.
    return Tally(**{name: count for name, count in counts.items() if name in Tally.__struct_fields__})
