"""The responses on Redis.

Keys: `response-head:ID` a head and `response-part:ID:NAME` a part; `open:responses` those that are not over, and
`unanswered@OWNER` an owner's, both by age; `asking` the owners of these, by when they had their last turn;
`expiring-heads` by when they expire; `staged:NAME` bytes that will be a part. Leases are those of jobs
(redis_store.py).
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import msgspec

from alignedserve.store.base import NUM_AT_A_TIME, Lease, LeaseState, Order, StoreAway, StoreLimits
from alignedserve.store.deliveries import Delivery
from alignedserve.store.records import JobId
from alignedserve.store.redis_connection import RedisConnection
from alignedserve.store.redis_deliveries import delivery_args
from alignedserve.store.response_scripts import (
    ADD,
    ADMIT,
    DELETE,
    ITEM_PAGE,
    REPLACE,
    STAGED_BYTES_LOST,
    TAKE,
)
from alignedserve.store.responses import (
    ItemPage,
    Part,
    Pieces,
    ResponseGone,
    ResponseHead,
    ResponseId,
    ResponseStore,
    sizes_of,
)
from alignedserve.store.scripts import BEGIN_LINES, PREFIX, RELEASE, RENEW

_LEASE_STATES: tuple[LeaseState, ...] = ("lost", "held", "cancelling")
_HEAD = f"{PREFIX}response-head:"
_PART = f"{PREFIX}response-part:"
_STAGED = f"{PREFIX}staged:"
_EXPIRING = f"{PREFIX}expiring-heads"
# The number of the only line that a response has, where jobs have many.
_LINE = 1
# Parts of this size at most go into the command that adds them.
SMALL_BYTES = 64 << 10
# The bytes of larger parts that are sent or fetched at a time. They take the event loop 0.3 ms in one step (1 MiB: 2
# ms), and the store is asked to write to its disk for each of them.
PIECE_BYTES = 256 << 10
# The seconds after which bytes that have not become a part are deleted.
STAGED_S = 600

Result = TypeVar("Result")


class RedisResponses(ResponseStore):
    def __init__(
        self, redis: RedisConnection, limits: StoreLimits, check: Callable[[int, Lease | None], int]
    ) -> None:
        """`check` raises the error that a script's answer stands for."""
        self._redis = redis
        self._limits = limits
        self._check = check

    async def add(self, head: ResponseHead, parts: Mapping[Part, Pieces]) -> None:
        record, is_open, limits = _encode(head), int(not head.is_over), self._limits
        bounds = [limits.max_open_jobs, limits.max_open_jobs_of_owner]
        given_bounds = ["" if bound is None else bound for bound in bounds] + [*self._byte_limits]
        size = len(record) + sum(sizes_of(parts).values())
        if size > SMALL_BYTES:
            # What is refused need not be sent.
            self._checked(await self._run(ADMIT, head.owner, is_open, size, *given_bounds))
        args = [record, head.id, head.owner, is_open, head.created_at, head.expires_at, *given_bounds]
        async with self._given(parts) as given:
            self._checked(await self._run(ADD, *args, *given))

    async def head(self, response_id: ResponseId) -> ResponseHead | None:
        found = await self._redis.call(self._redis.get(_HEAD + response_id))
        return None if found is None else msgspec.msgpack.decode(found, type=ResponseHead)

    async def pieces(
        self, head: ResponseHead, part: Part, begin: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        end = head.size_of(part) if end is None else end
        for first in range(begin, end, PIECE_BYTES):
            last = min(first + PIECE_BYTES, end)
            piece = await self._redis.call(self._redis.piece(f"{_PART}{head.id}:{part}", first, last))
            if len(piece) < last - first:
                raise ResponseGone(head.id)
            yield piece

    async def item_page(
        self, response_id: ResponseId, after: bytes | None, limit: int, order: Order
    ) -> ItemPage | None:
        found = await self._run(ITEM_PAGE, response_id, after or b"", limit, int(order == "desc"))
        if found is None:
            raise ResponseGone(response_id)
        if not found:
            return None
        spans = list(zip(found[3::3], found[4::3], strict=True))
        return ItemPage(spans, found[2] if spans else None, found[1] if spans else None, found[0] == b"1")

    async def replace(
        self,
        old: ResponseHead,
        new: ResponseHead,
        lease: Lease | None,
        deliveries: Sequence[Delivery] = (),
        parts: Mapping[Part, Pieces] | None = None,
    ) -> bool:
        args = [lease.token if lease else "", new.id, _encode(old), _encode(new), new.owner, int(new.is_over)]
        async with self._given(parts or {}) as given:
            args += [*self._byte_limits, len(parts or {}), *given, *delivery_args(deliveries)]
            return bool(self._checked(await self._run(REPLACE, *args), lease))

    async def delete(self, head: ResponseHead) -> None:
        await self._run(DELETE, head.id, head.owner)

    async def expired(self, now: float) -> list[ResponseHead]:
        ids = await self._redis.call(self._redis.due(_EXPIRING, now, NUM_AT_A_TIME))
        found = [await self.head(ResponseId(each)) for each in ids]
        return [head for head in found if head]

    async def take(self, holder: str, seconds: float, count: int, max_of_owner: int) -> list[Lease]:
        token = f"{await self._redis.call(self._redis.next_number())}:{holder}"
        found = await self._run(TAKE, token, _milliseconds(seconds), count, max_of_owner)
        return [Lease(JobId(each.decode()), token) for each in found]

    async def renew(self, leases: Sequence[Lease], seconds: float) -> list[LeaseState]:
        if not leases:
            return []
        words = [word for lease in leases for word in (lease.job_id, lease.token)]
        return [_LEASE_STATES[each] for each in await self._run(RENEW, _milliseconds(seconds), *words)]

    async def release(self, lease: Lease) -> None:
        await self._run(RELEASE, lease.token, lease.job_id)

    async def begin(self, lease: Lease) -> int:
        self._check(await self._run(BEGIN_LINES, lease.token, lease.job_id, _LINE), lease)
        found = await self._redis.call(self._redis.field(f"{PREFIX}falls:{lease.job_id}", str(_LINE)))
        return int(found or 0)

    @property
    def _byte_limits(self) -> tuple[int | str, int | str]:
        """The limits of bytes as scripts take them: in all, and of the owner."""
        limits = self._limits.max_bytes, self._limits.max_bytes_of_owner
        most, most_of_owner = ("" if limit is None else limit for limit in limits)
        return most, most_of_owner

    @asynccontextmanager
    async def _given(self, parts: Mapping[Part, Pieces]) -> AsyncIterator[list[str | bytes]]:
        """Yields a script's arguments for new parts. Large ones are sent before, in pieces; what the script did not
        take is deleted after the block."""
        args: list[str | bytes] = []
        staged: list[str] = []
        try:
            for name, pieces in parts.items():
                if (size := sum(map(len, pieces))) <= SMALL_BYTES:
                    args += [name, "", b"".join(pieces)]
                    continue
                staged.append(secrets.token_hex(8))
                args += [name, staged[-1], str(size)]
                await self._stage(_STAGED + staged[-1], pieces)
            yield args
        finally:
            if staged:
                with suppress(StoreAway):
                    await self._redis.call(self._redis.unlink([_STAGED + name for name in staged]))

    async def _stage(self, key: str, pieces: Pieces) -> None:
        offset = 0
        for block in _blocks(pieces):
            if await self._redis.call(self._redis.put_piece(key, offset, block, STAGED_S)) < offset:
                raise _lost()
            offset += len(block)

    def _checked(self, done: int, lease: Lease | None = None) -> int:
        """Raises the error that a script's answer stands for; otherwise returns the answer."""
        if done == STAGED_BYTES_LOST:
            raise _lost()
        return self._check(done, lease)

    def _run(self, script: str, *args: Any) -> Coroutine[Any, Any, Any]:
        return self._redis.call(self._redis.run(script, *args))


def _blocks(pieces: Pieces) -> Iterator[bytes]:
    """Yields the same bytes in blocks of less than twice PIECE_BYTES."""
    block = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        for first in range(0, len(view), PIECE_BYTES):
            block += view[first : first + PIECE_BYTES]
            if len(block) >= PIECE_BYTES:
                yield bytes(block)
                block.clear()
    if block:
        yield bytes(block)


def _lost() -> StoreAway:
    return StoreAway("bytes that it was sent are not there any more")


def _encode(head: ResponseHead) -> bytes:
    return msgspec.msgpack.encode(head)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
