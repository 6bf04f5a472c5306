"""The leases of jobs, responses and deliveries on Redis.

Keys: `holder:ID`, the last holder's token; `lease:ID`, the same until it expires; `running:ID`, the lines that the
holder runs; `falls:ID`, a hash of crash counts by line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alignedserve.store import scripts
from alignedserve.store.records import Lease, LeaseState
from alignedserve.store.redis_connection import RedisConnection

_STATES: tuple[LeaseState, ...] = ("lost", "held", "cancelling")


class RedisLeases(RedisConnection):
    async def taken(self, script: str, holder: str, seconds: float, count: int, *args: Any) -> list[Lease]:
        """Returns at most `count` leases, which the script takes. Its first arguments are token, milliseconds and
        count."""
        # Tokens are unique. A token with which nothing is taken is never used again.
        token = f"{await self.call(self.next_number())}:{holder}"
        found = await self.call(self.run(script, token, _milliseconds(seconds), count, *args))
        return [Lease(each.decode(), token) for each in found]

    async def renew(self, leases: Sequence[Lease], seconds: float) -> list[LeaseState]:
        if not leases:
            return []
        words = [word for lease in leases for word in (lease.id, lease.token)]
        found = await self.call(self.run(scripts.RENEW, _milliseconds(seconds), *words))
        return [_STATES[each] for each in found]

    async def release(self, lease: Lease) -> None:
        await self.call(self.run(scripts.RELEASE, lease.token, lease.id))


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
