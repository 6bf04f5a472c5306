"""The store on Redis, or what speaks its protocol.

Keys, all under one prefix: `file:ID` a record, `data:ID` a hash of its chunks by number, `uses:ID` the open jobs that
read it; `job:ID` a record, `lease:ID` a token that lapses, `results:ID` a hash by line number, `tally:ID` a hash of
counts; `state:NAME` bytes. Listings are sorted sets of ids: `files`, `files:PURPOSE`, `jobs` by age, `open` and
`expiring` by deadline.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import msgspec
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, OutOfMemoryError, ReadOnlyError, ResponseError, TimeoutError

from alignedserve.store import scripts
from alignedserve.store.base import UNCOMMITTED_S, Lease, LeaseLost, Order, Page, Store, StoreAway
from alignedserve.store.records import FileId, FileRecord, JobId, JobRecord, LineResult, Purpose, Tally

PREFIX = "alignedserve:"
MAX_CONNECTIONS = 32
# Longer than a write to a busy disk takes; one that hangs is as good as away.
TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 2.0

# Answers of a Redis that is there, and takes no writes, or nothing: its disk is full, its replicas are gone, ...
_NOT_NOW = re.compile(r"\b(MISCONF|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|BUSY)\b")

PURPOSES: tuple[Purpose, ...] = ("batch", "batch_output")

Args = ParamSpec("Args")
Result = TypeVar("Result")


def _away(
    method: Callable[Concatenate[RedisStore, Args], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[RedisStore, Args], Coroutine[Any, Any, Result]]:
    """Redis's ways of not being there, BusyLoadingError and AuthenticationError among them, as the store's.

    In a task of its own, which goes on when the caller is cancelled: redis-py 8.1 swallows cancellations.
    """

    @functools.wraps(method)
    async def asking(store: RedisStore, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        call = asyncio.create_task(method(store, *args, **kwargs))
        store.calls.add(call)
        call.add_done_callback(store.over)
        try:
            return await asyncio.shield(call)
        except (ConnectionError, TimeoutError, ReadOnlyError, OutOfMemoryError, OSError) as error:
            raise StoreAway(str(error) or type(error).__name__) from error
        except ResponseError as error:
            if not _NOT_NOW.search(str(error)):
                raise
            raise StoreAway(str(error)) from error

    return asking


class RedisStore(Store):
    def __init__(self, url: str) -> None:
        """Raises ValueError for what is no URL of a Redis."""
        pool: Any = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=TIMEOUT_S,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            # once: a connection from before Redis's restart is found to be dead when it is used
            retry=Retry(NoBackoff(), 1),
        )
        self._redis: Any = Redis(connection_pool=pool)
        self._scripts: dict[str, Any] = {}
        # that go on, perhaps with nobody waiting for them
        self.calls: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        await asyncio.gather(*self.calls, return_exceptions=True)
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    def over(self, call: asyncio.Task[Any]) -> None:
        """Whoever was cancelled meanwhile does not hear what became of it any more, and nobody else needs to."""
        self.calls.discard(call)
        if not call.cancelled():
            call.exception()

    @_away
    async def ping(self) -> None:
        await self._redis.ping()

    # ---- files ----

    @_away
    async def put_chunk(self, file_id: FileId, number: int, data: bytes) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(_key("data", file_id), number, data)
            pipe.expire(_key("data", file_id), UNCOMMITTED_S)
            await pipe.execute()

    @_away
    async def commit_file(self, file: FileRecord) -> None:
        keys = [*_file_keys(file), _key("expiring")]
        score = await self._next_score()
        expires = "" if file.expires_at is None else file.expires_at
        args = [_encode(file), file.id, score, file.num_chunks, expires]
        if not await self._run(scripts.COMMIT_FILE, keys, args):
            raise ValueError(f"file {file.id}: not all of its {file.num_chunks} chunks are there")

    @_away
    async def drop_chunks(self, file_id: FileId) -> None:
        await self._run(scripts.DROP_CHUNKS, [_key("file", file_id), _key("data", file_id)], [])

    @_away
    async def file(self, file_id: FileId) -> FileRecord | None:
        found = await self._redis.get(_key("file", file_id))
        return None if found is None else _decode(found, FileRecord)

    @_away
    async def chunk(self, file_id: FileId, number: int) -> bytes | None:
        return cast(bytes | None, await self._redis.hget(_key("data", file_id), number))

    @_away
    async def delete_file(self, file_id: FileId) -> Literal["deleted", "absent", "in_use"]:
        keys = [_key(kind, file_id) for kind in ("file", "data", "uses")]
        keys += [_key("files"), _key("expiring"), *(_key("files", purpose) for purpose in PURPOSES)]
        done = await self._run(scripts.DELETE_FILE, keys, [file_id])
        return cast(Literal["deleted", "absent", "in_use"], done.decode())

    @_away
    async def list_files(
        self, purpose: Purpose | None, after: FileId | None, limit: int, order: Order
    ) -> Page | None:
        listing = _key("files") if purpose is None else _key("files", purpose)
        return await self._page(listing, after, limit, order == "desc")

    @_away
    async def expired_files(self, now: float) -> list[FileId]:
        found = await self._redis.zrange(_key("expiring"), "-inf", now, byscore=True)
        return [FileId(each.decode()) for each in found]

    # ---- jobs ----

    @_away
    async def add_job(self, job: JobRecord) -> bool:
        keys = [_key("job", job.id), _key("jobs"), _key("open")]
        keys += [_key("file", job.input_file_id), _key("uses", job.input_file_id)]
        args = [_encode(job), job.id, await self._next_score(), job.expires_at]
        return bool(await self._run(scripts.ADD_JOB, keys, args))

    @_away
    async def job(self, job_id: JobId) -> JobRecord | None:
        found = await self._redis.get(_key("job", job_id))
        return None if found is None else _decode(found, JobRecord)

    @_away
    async def tally(self, job_id: JobId) -> Tally:
        found = await self._redis.hgetall(_key("tally", job_id))
        return Tally(**{name.decode(): int(count) for name, count in found.items()})

    @_away
    async def list_jobs(self, after: JobId | None, limit: int) -> Page | None:
        return await self._page(_key("jobs"), after, limit, newest_first=True)

    @_away
    async def open_jobs(self) -> list[JobRecord]:
        ids = await self._redis.zrange(_key("open"), 0, -1)
        if not ids:
            return []
        found = await self._redis.mget([_key("job", each.decode()) for each in ids])
        return [_decode(each, JobRecord) for each in found if each is not None]

    async def replace_job(self, old: JobRecord, new: JobRecord, lease: Lease | None) -> bool:
        return await self._replace(old, new, lease, [])

    async def finish_job(
        self, old: JobRecord, new: JobRecord, lease: Lease, files: Sequence[FileRecord]
    ) -> bool:
        return await self._replace(old, new, lease, files)

    # ---- what was learned ----

    @_away
    async def put_state(self, name: str, data: bytes) -> None:
        await self._redis.set(_key("state", name), data)

    @_away
    async def state(self, name: str) -> bytes | None:
        return cast(bytes | None, await self._redis.get(_key("state", name)))

    # ---- leases ----

    @_away
    async def acquire(self, job_id: JobId, owner: str, seconds: float) -> Lease | None:
        token = f"{await self._next_score()}:{owner}"
        taken = await self._redis.set(_key("lease", job_id), token, nx=True, px=_milliseconds(seconds))
        return Lease(job_id, token) if taken else None

    @_away
    async def renew(self, lease: Lease, seconds: float) -> None:
        key = _key("lease", lease.job_id)
        _held(lease, await self._run(scripts.RENEW, [key], [lease.token, _milliseconds(seconds)]))

    @_away
    async def release(self, lease: Lease) -> None:
        await self._run(scripts.RELEASE, [_key("lease", lease.job_id)], [lease.token])

    # ---- results ----

    @_away
    async def put_result(self, lease: Lease, line: int, result: LineResult) -> None:
        keys = [_key(kind, lease.job_id) for kind in ("lease", "results", "tally")]
        count = "num_failed" if result.is_error else "num_completed"
        tokens = [result.num_input_tokens, result.num_output_tokens, result.num_cached_tokens]
        args = [lease.token, line, _encode(result), count, *tokens]
        _held(lease, await self._run(scripts.PUT_RESULT, keys, args))

    @_away
    async def lines_done(self, job_id: JobId) -> list[int]:
        return [int(number) for number in await self._redis.hkeys(_key("results", job_id))]

    @_away
    async def results(self, job_id: JobId, lines: Sequence[int]) -> list[LineResult | None]:
        found = await self._redis.hmget(_key("results", job_id), lines)
        return [None if each is None else _decode(each, LineResult) for each in found]

    # ---- how it is done ----

    @_away
    async def _replace(
        self, old: JobRecord, new: JobRecord, lease: Lease | None, files: Sequence[FileRecord]
    ) -> bool:
        keys = [_key("lease", new.id), _key("job", new.id), _key("open")]
        keys += [_key("results", new.id), _key("uses", new.input_file_id)]
        token = lease.token if lease else ""
        score = await self._next_score() if files else 0
        args: list[Any] = [token, _encode(old), _encode(new), new.id, int(new.is_over), score]
        for file in files:
            keys += _file_keys(file)
            args += [_encode(file), file.id]
        done = await self._run(scripts.REPLACE_JOB, keys, args)
        if lease:
            _held(lease, done)
        return bool(done)

    async def _page(self, listing: str, after: str | None, limit: int, newest_first: bool) -> Page | None:
        start = 0
        if after is not None:
            rank = await (self._redis.zrevrank if newest_first else self._redis.zrank)(listing, after)
            if rank is None:
                return None
            start = rank + 1
        found = await self._redis.zrange(listing, start, start + limit, desc=newest_first)
        return Page([each.decode() for each in found[:limit]], has_more=len(found) > limit)

    async def _next_score(self) -> int:
        # steps of two: the two files of a job have one each
        return int(await self._redis.incrby(_key("sequence"), 2))

    async def _run(self, script: str, keys: list[str], args: list[Any]) -> Any:
        if script not in self._scripts:
            self._scripts[script] = self._redis.register_script(script)
        return await self._scripts[script](keys, args)


def _held(lease: Lease, done: int) -> None:
    if done == -1:
        raise LeaseLost(f"job {lease.job_id}: lease {lease.token} is lost")


def _key(*words: str) -> str:
    return PREFIX + ":".join(words)


def _file_keys(file: FileRecord) -> list[str]:
    return [_key("file", file.id), _key("data", file.id), _key("files"), _key("files", file.purpose)]


def _encode(record: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(record)


Record = TypeVar("Record", bound=msgspec.Struct)


def _decode(data: bytes, kind: type[Record]) -> Record:
    return msgspec.msgpack.decode(data, type=kind)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
