"""Deliveries of webhooks on Redis.

Keys: `delivery:ID`, a record; `open:delivering`, pending ones by due time; `deliveries-refused`, the number of refused
ones; and the keys of leases (redis_leases.py).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from alignedserve.store.deliveries import MAX_PENDING, Delivery, DeliveryStore
from alignedserve.store.records import Lease
from alignedserve.store.redis_leases import RedisLeases
from alignedserve.store.scripts import PREFIX, TAKE

# For scripts that store deliveries with something else. Arguments from `first` on: id, record, due time.
DELIVER = f"""
local function deliver(first)
  for at = first, #ARGV, 3 do
    if redis.call('ZCARD', key('open', 'delivering')) >= {MAX_PENDING} then
      redis.call('INCR', key('deliveries-refused'))
    else
      redis.call('SET', key('delivery', ARGV[at]), ARGV[at + 1])
      redis.call('ZADD', key('open', 'delivering'), ARGV[at + 2], ARGV[at])
    end
  end
end
"""

# Arguments: token, id.
_END = """
local token, id = unpack(ARGV)
if not is_held(id, token) then return -1 end
redis.call('DEL', key('delivery', id))
redis.call('ZREM', key('open', 'delivering'), id)
let_go(id)
return 1
"""

# Arguments: token, id, record, due time.
_PUT_OFF = """
local token, id, record, due = unpack(ARGV)
if not is_held(id, token) then return -1 end
redis.call('SET', key('delivery', id), record)
redis.call('ZADD', key('open', 'delivering'), due, id)
let_go(id)
return 1
"""

_REFUSED = """
local count = redis.call('GET', key('deliveries-refused'))
redis.call('DEL', key('deliveries-refused'))
return tonumber(count or '0')
"""


class RedisDeliveries(DeliveryStore):
    def __init__(self, redis: RedisLeases, check: Callable[[int, Lease | None], int]) -> None:
        """`check` raises the error for a script's negative answer."""
        self._redis = redis
        self._check = check

    async def take(self, holder: str, seconds: float, now: float, count: int) -> list[Lease]:
        if not await self._redis.call(self._redis.due(f"{PREFIX}open:delivering", now, 1)):
            return []
        return await self._redis.taken(TAKE, holder, seconds, count, "delivering", now)

    async def get(self, lease: Lease) -> Delivery | None:
        found = await self._redis.call(self._redis.get(f"{PREFIX}delivery:{lease.id}"))
        return None if found is None else msgspec.msgpack.decode(found, type=Delivery)

    async def end(self, lease: Lease) -> None:
        self._check(await self._run(_END, lease.token, lease.id), lease)

    async def put_off(self, lease: Lease, delivery: Delivery, due_at: float) -> None:
        args = lease.token, lease.id, msgspec.msgpack.encode(delivery), due_at
        self._check(await self._run(_PUT_OFF, *args), lease)

    async def release(self, lease: Lease) -> None:
        await self._redis.release(lease)

    async def refused(self) -> int:
        return int(await self._run(_REFUSED))

    def _run(self, script: str, *args: Any) -> Coroutine[Any, Any, Any]:
        return self._redis.call(self._redis.run(script, *args))


def delivery_args(deliveries: Sequence[Delivery]) -> list[Any]:
    """Returns the arguments for DELIVER, with the deliveries due immediately."""
    return [word for each in deliveries for word in (each.id, msgspec.msgpack.encode(each), each.created_at)]
