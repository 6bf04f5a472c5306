"""A connection to Redis, or a server with its protocol, and the ways in which it can fail."""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, OutOfMemoryError, ReadOnlyError, ResponseError, TimeoutError

from alignedserve.store import scripts
from alignedserve.store.homes.base import StoreAway
from alignedserve.store.liveness import Liveness
from alignedserve.store.redis_pool import RedisPool

MAX_CONNECTIONS = 32
# Timeout of a call, in seconds. It is longer than a write to a busy disk takes.
TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 2.0
# If nothing is received for PATIENCE_S seconds, divided into NUM_TICKS ticks, no further call waits.
PATIENCE_S, NUM_TICKS = 2.0, 10

# Errors of a Redis that refuses writes or commands for now: its disk is full, its replicas are gone, ...
_NOT_NOW = re.compile(r"\b(MISCONF|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|BUSY)\b")

Args = ParamSpec("Args")
Result = TypeVar("Result")

Connected = TypeVar("Connected", bound="RedisConnection")
Method = Callable[Concatenate[Connected, Args], Coroutine[Any, Any, Result]]


def asks(method: Method[Connected, Args, Result]) -> Method[Connected, Args, Result]:
    """Decorates a method so that errors of Redis become StoreAway."""

    @functools.wraps(method)
    async def asking(store: Connected, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        return await store.call(method(store, *args, **kwargs))

    return asking


class RedisConnection:
    def __init__(self, url: str) -> None:
        """Raises ValueError for an invalid URL: see redis_pool.py."""
        self._pool = RedisPool(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=TIMEOUT_S,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            # One retry: a connection from before a restart of Redis fails when it is used.
            retry=Retry(NoBackoff(), 1, supported_errors=(ConnectionError,)),
        )
        self._redis: Any = Redis(connection_pool=self._pool.connections)
        self._scripts: dict[str, Any] = {}
        self._hearing = Liveness(NUM_TICKS)
        self._is_ticking = False
        self._is_down = False
        self._reason = ""
        # Running calls, perhaps without a waiting caller.
        self._calls: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._redis.aclose()
        await self._pool.close()

    @property
    def is_down(self) -> bool:
        return self._is_down

    @property
    def why_down(self) -> str:
        """Returns the address, without user and password, and the latest error."""
        return f"{self._pool.place}: {self._reason}"

    async def probe(self) -> None:
        """See Store."""
        # The probe writes, because reads prove little: on a full disk, Redis exits at the first write after each start.
        await self.call(self._redis.set(f"{scripts.PREFIX}probe", int(time.time())))
        self._is_down = False

    async def call(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Runs the call in a task that goes on if the caller is cancelled: redis-py 8.1 swallows cancellations."""
        if self._hearing.is_silent:
            call.close()
            away = StoreAway("it does not answer")
            self._failed(away)
            raise away
        task = asyncio.create_task(self._heard(call))
        self._calls.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    @asks
    async def get(self, key: str) -> bytes | None:
        return cast(bytes | None, await self._redis.get(key))

    @asks
    async def piece(self, key: str, begin: int, end: int) -> bytes:
        """Returns the bytes from `begin` to `end`, or fewer if the value is shorter."""
        return cast(bytes, await self._redis.getrange(key, begin, end - 1))

    @asks
    async def put_piece(self, key: str, offset: int, data: bytes, seconds: int) -> int:
        """Writes bytes at an offset in a value, which expires after `seconds`. Returns the value's previous length. If
        that was less than `offset`, the gap is now zeros."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            found = await pipeline.strlen(key).setrange(key, offset, data).expire(key, seconds).execute()
        return cast(int, found[0])

    @asks
    async def unlink(self, keys: Sequence[str]) -> None:
        await self._redis.unlink(*keys)

    @asks
    async def field(self, key: str, name: str) -> bytes | None:
        return cast(bytes | None, await self._redis.hget(key, name))

    @asks
    async def due(self, listing: str, by: float, count: int) -> list[str]:
        """Returns the first members of a sorted set with a score of at most `by`."""
        found = await self._redis.zrange(listing, "-inf", by, byscore=True, offset=0, num=count)
        return [each.decode() for each in found]

    @asks
    async def next_number(self) -> int:
        """Returns a number that is never returned again."""
        return int(await self._redis.incr(f"{scripts.PREFIX}sequence"))

    @asks
    async def run(self, script: str, *args: Any) -> Any:
        if script not in self._scripts:
            self._scripts[script] = self._redis.register_script(scripts.COMMON + script)
        return await self._scripts[script]([], args)

    async def _heard(self, call: Coroutine[Any, Any, Result]) -> Result:
        self._hearing.asked()
        if not self._is_ticking:
            self._next_tick()
        try:
            return await self._translated(call)
        except StoreAway as error:
            self._failed(error)
            raise

    def _failed(self, error: StoreAway) -> None:
        self._is_down, self._reason = True, str(error)

    async def _translated(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Translates errors to StoreAway. BusyLoadingError and AuthenticationError are ConnectionErrors."""
        is_heard = True
        try:
            return await call
        except TimeoutError as error:
            is_heard = False
            raise StoreAway(str(error)) from error
        except (ConnectionError, ReadOnlyError, OutOfMemoryError, OSError) as error:
            raise StoreAway(str(error) or type(error).__name__) from error
        except ResponseError as error:
            if not _NOT_NOW.search(str(error)):
                raise
            raise StoreAway(str(error)) from error
        finally:
            self._hearing.answered() if is_heard else self._hearing.given_up()

    def _next_tick(self) -> None:
        """Starts the next tick, while any call waits."""
        if self._is_ticking:
            self._hearing.tick()
        self._is_ticking = self._hearing.is_asked
        if self._is_ticking:
            asyncio.get_running_loop().call_later(PATIENCE_S / NUM_TICKS, self._next_tick)

    def _over(self, call: asyncio.Task[Any]) -> None:
        """Marks the outcome as retrieved: if the caller was cancelled, nothing else does."""
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()
