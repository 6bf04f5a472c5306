"""The leases of jobs, responses and deliveries on Redis, and what the answers of scripts mean.

Keys: `holder:ID`, the last holder's token; `lease:ID`, the same until it expires; `running:ID`, the lines that the
holder runs; `falls:ID`, a hash of crash counts by line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alignedserve.store import scripts
from alignedserve.store.base import StoreLimits
from alignedserve.store.homes.base import StoreAway
from alignedserve.store.records import Lease, Leases, LeaseState
from alignedserve.store.redis_connection import RedisConnection
from alignedserve.store.responses import ConversationFull

_STATES: tuple[LeaseState, ...] = ("lost", "held", "cancelling")


class RedisLeases(RedisConnection, Leases):
    def __init__(self, url: str, limits: StoreLimits | None = None) -> None:
        """Raises ValueError for an invalid URL."""
        super().__init__(url)
        # They may be changed, and count from the next request on.
        self.limits = limits or StoreLimits()

    # ---- scripts ----

    async def done(self, script: str, *args: Any, lease: Lease | None = None, is_apart: bool = False) -> int:
        """Runs a script and returns its answer. Raises the error that a negative answer stands for."""
        done: int = await self.run(script, *args)
        match done:
            case -1:
                assert lease
                raise lease.lost()
            case -2 | -3:
                raise self.limits.full(is_owners=done == -3, is_apart=is_apart)
            case -4 | -5:
                raise self.limits.too_many_jobs(is_owners=done == -5)
            case -6:
                raise bytes_lost()
            case -7:
                raise ConversationFull
            case _ if done < 0:
                raise RuntimeError(f"a script answered {done}")
        return done

    def byte_limits(self, is_bounded: bool = True, is_apart: bool = False) -> list[int | str]:
        """Returns the limits as scripts expect them: in total, and the owner's."""
        limits = self.limits
        if not is_bounded:
            return ["", ""]
        if is_apart:
            return [or_none(limits.max_bytes_apart), or_none(limits.max_bytes_apart_of_owner)]
        return [or_none(limits.max_bytes), or_none(limits.max_bytes_of_owner)]

    def open_limits(self) -> list[int | str]:
        """Returns the limits of open jobs, then those of bytes."""
        limits = self.limits
        return [or_none(limits.max_open_jobs), or_none(limits.max_open_jobs_of_owner), *self.byte_limits()]

    # ---- leases ----

    async def take_due(
        self, listing: str, due_by: float, holder: str, seconds: float, count: int
    ) -> list[Lease]:
        """Takes at most `count` leases in the listing `open:NAME`, the earliest due first."""
        if not count or not await self.due(f"{scripts.PREFIX}open:{listing}", due_by, 1):
            return []
        return await self.taken(scripts.TAKE, holder, seconds, count, listing, due_by)

    async def taken(self, script: str, holder: str, seconds: float, count: int, *args: Any) -> list[Lease]:
        """Returns at most `count` leases, which the script takes. Its first arguments are token, milliseconds and
        count."""
        # Tokens are unique. A token with which nothing is taken is never used again.
        token = f"{await self.next_number()}:{holder}"
        found = await self.run(script, token, _milliseconds(seconds), count, *args)
        return [Lease(each.decode(), token) for each in found]

    async def renew(self, leases: Sequence[Lease], seconds: float) -> list[LeaseState]:
        if not leases:
            return []
        words = [word for lease in leases for word in (lease.id, lease.token)]
        return [_STATES[each] for each in await self.run(scripts.RENEW, _milliseconds(seconds), *words)]

    async def release(self, lease: Lease) -> None:
        await self.run(scripts.RELEASE, lease.token, lease.id)


class LeasedOnRedis(Leases):
    """A part of the store with leases of its own kind."""

    def __init__(self, redis: RedisLeases) -> None:
        self._redis = redis

    async def renew(self, leases: Sequence[Lease], seconds: float) -> list[LeaseState]:
        return await self._redis.renew(leases, seconds)

    async def release(self, lease: Lease) -> None:
        await self._redis.release(lease)


def or_none(limit: int | None) -> int | str:
    """Returns a script's argument, for which '' is None."""
    return "" if limit is None else limit


def bytes_lost() -> StoreAway:
    return StoreAway("bytes that it was sent are not there any more")


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
