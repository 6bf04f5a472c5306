"""The responses on Redis.

Keys: `response:ID` a record; `open:responding` those that are not over, and `responding@OWNER` an owner's, both by age;
`expiring-responses` by when they expire. Leases are those of jobs (redis_store.py).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from alignedserve.store.base import NUM_AT_A_TIME, Lease, LeaseState, StoreLimits
from alignedserve.store.deliveries import Delivery
from alignedserve.store.records import JobId
from alignedserve.store.redis_connection import RedisConnection
from alignedserve.store.redis_deliveries import DELIVER, delivery_args
from alignedserve.store.responses import ResponseId, ResponseRecord, ResponseStore
from alignedserve.store.scripts import BEGIN_LINES, PREFIX, RELEASE, RENEW, TAKE

_LEASE_STATES: tuple[LeaseState, ...] = ("lost", "held", "cancelling")
_RECORD = f"{PREFIX}response:"
_EXPIRING = f"{PREFIX}expiring-responses"
# The number of the only line that a response has, where jobs have many.
_LINE = 1

# Arguments: record, id, owner, '1' if it is open; when it was created, when it expires; limits: of open responses in
# all and of the owner, of bytes.
ADD = """
local record, id, owner, is_open, created_at, expires_at = unpack(ARGV)
if redis.call('EXISTS', key('response', id)) == 1 then return 1 end
if is_open == '1' then
  if ARGV[8] ~= '' and redis.call('ZCARD', listed('responding', owner)) >= tonumber(ARGV[8]) then return -5 end
  if ARGV[7] ~= '' and redis.call('ZCARD', key('open', 'responding')) >= tonumber(ARGV[7]) then return -4 end
end
local refused = full(owner, #record, ARGV[9], ARGV[10])
if refused then return refused end
charge(owner, #record)
redis.call('SET', key('response', id), record)
redis.call('ZADD', key('expiring-responses'), expires_at, id)
if is_open == '1' then
  redis.call('ZADD', key('open', 'responding'), created_at, id)
  redis.call('ZADD', listed('responding', owner), created_at, id)
end
return 1
"""

_CLOSE = """
local function close(id, owner)
  redis.call('ZREM', key('open', 'responding'), id)
  redis.call('ZREM', listed('responding', owner), id)
  redis.call('DEL', key('falls', id))
  let_go(id)
end
"""

# Arguments: token or ''; id, old record, new record, owner, '1' if it is over; and per delivery: id, record, when it is
# due.
REPLACE = (
    DELIVER
    + _CLOSE
    + """
local token, id, old, new, owner, is_over = unpack(ARGV)
if token ~= '' and not is_held(id, token) then return -1 end
if redis.call('GET', key('response', id)) ~= old then return 0 end
charge(owner, #new - #old)
redis.call('SET', key('response', id), new)
if is_over == '1' then close(id, owner) end
deliver(7)
return 1
"""
)

# Arguments: id, owner.
DELETE = (
    _CLOSE
    + """
local id, owner = unpack(ARGV)
charge(owner, -redis.call('STRLEN', key('response', id)))
redis.call('DEL', key('response', id))
redis.call('ZREM', key('expiring-responses'), id)
close(id, owner)
return 1
"""
)

Result = TypeVar("Result")


class RedisResponses(ResponseStore):
    def __init__(
        self, redis: RedisConnection, limits: StoreLimits, check: Callable[[int, Lease | None], int]
    ) -> None:
        """`check` raises the error that a script's answer stands for."""
        self._redis = redis
        self._limits = limits
        self._check = check

    async def add(self, record: ResponseRecord) -> None:
        limits = self._limits
        bounds = (
            limits.max_open_jobs,
            limits.max_open_jobs_of_owner,
            limits.max_bytes,
            limits.max_bytes_of_owner,
        )
        args = [_encode(record), record.id, record.owner, int(not record.is_over)]
        args += [record.created_at, record.expires_at, *("" if bound is None else bound for bound in bounds)]
        self._check(await self._run(ADD, *args), None)

    async def get(self, response_id: ResponseId) -> ResponseRecord | None:
        found = await self._redis.call(self._redis.get(_RECORD + response_id))
        return None if found is None else _decode(found)

    async def replace(
        self,
        old: ResponseRecord,
        new: ResponseRecord,
        lease: Lease | None,
        deliveries: Sequence[Delivery] = (),
    ) -> bool:
        args = [lease.token if lease else "", new.id, _encode(old), _encode(new), new.owner, int(new.is_over)]
        return bool(self._check(await self._run(REPLACE, *args, *delivery_args(deliveries)), lease))

    async def delete(self, record: ResponseRecord) -> None:
        await self._run(DELETE, record.id, record.owner)

    async def expired(self, now: float) -> list[ResponseRecord]:
        ids = await self._redis.call(self._redis.due(_EXPIRING, now, NUM_AT_A_TIME))
        found = [await self.get(ResponseId(each)) for each in ids]
        return [record for record in found if record]

    async def take(self, holder: str, seconds: float, count: int) -> list[Lease]:
        token = f"{await self._redis.call(self._redis.next_number())}:{holder}"
        found = await self._run(TAKE, "responding", "+inf", token, _milliseconds(seconds), count)
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

    def _run(self, script: str, *args: Any) -> Coroutine[Any, Any, Any]:
        return self._redis.call(self._redis.run(script, *args))


def _encode(record: ResponseRecord) -> bytes:
    return msgspec.msgpack.encode(record)


def _decode(data: bytes) -> ResponseRecord:
    return msgspec.msgpack.decode(data, type=ResponseRecord)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
