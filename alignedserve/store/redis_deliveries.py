"""Deliveries of webhooks on Redis.

Keys: `delivery:ID`, a record; `open:delivering`, pending ones by due time; `deliveries-refused`, the number of refused
ones; and the keys of leases (redis_leases.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from alignedserve.store.deliveries import MAX_PENDING, Delivery, DeliveryStore
from alignedserve.store.records import Lease
from alignedserve.store.redis_leases import LeasedOnRedis
from alignedserve.store.scripts import PREFIX

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


class RedisDeliveries(LeasedOnRedis, DeliveryStore):
    async def take(self, holder: str, seconds: float, now: float, count: int) -> list[Lease]:
        return await self._redis.take_due("delivering", now, holder, seconds, count)

    async def get(self, lease: Lease) -> Delivery | None:
        found = await self._redis.get(f"{PREFIX}delivery:{lease.id}")
        return None if found is None else msgspec.msgpack.decode(found, type=Delivery)

    async def end(self, lease: Lease) -> None:
        await self._redis.done(_END, lease.token, lease.id, lease=lease)

    async def put_off(self, lease: Lease, delivery: Delivery, due_at: float) -> None:
        args = lease.token, lease.id, msgspec.msgpack.encode(delivery), due_at
        await self._redis.done(_PUT_OFF, *args, lease=lease)

    async def refused(self) -> int:
        return int(await self._redis.run(_REFUSED))


def delivery_args(deliveries: Sequence[Delivery]) -> list[Any]:
    """Returns the arguments for DELIVER, with the deliveries due immediately."""
    return [word for each in deliveries for word in (each.id, msgspec.msgpack.encode(each), each.created_at)]
