"""A real Redis for tests, as `alignedserve serve` starts it."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from alignedserve.store import StoreAway, StoreLimits
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.server import PrivateServer, find_server, locked
from tests import playing


class RedisProcess:
    def __init__(self, server: PrivateServer) -> None:
        self.server = server
        self.url = server.url
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await self.server.start()
        store = RedisStore(self.url)
        while self._process.returncode is None:
            with suppress(StoreAway):
                await store.ping()
                break
            await asyncio.sleep(0.01)
        await store.close()
        assert self._process.returncode is None, self.server.last_words(self._process.pid)

    async def kill(self) -> None:
        assert self._process
        self._process.kill()
        await self._process.wait()
        self._process = None

    def pause(self) -> None:
        """It hangs from here on."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)

    @property
    def is_running(self) -> bool:
        return self._process is not None


@asynccontextmanager
async def redis_running() -> AsyncIterator[RedisProcess]:
    """Directly in /tmp: a socket's path must be short."""
    directory = Path(tempfile.mkdtemp(prefix="redis-", dir="/tmp"))
    try:
        with locked(directory) as lock:
            redis = RedisProcess(PrivateServer(find_server(), directory, lock))
            await redis.start()
            try:
                yield redis
            finally:
                if redis.is_running:
                    await redis.kill()
    finally:
        shutil.rmtree(directory)


@asynccontextmanager
async def redis_store(limits: StoreLimits | None = None) -> AsyncIterator[tuple[RedisProcess, RedisStore]]:
    async with redis_running() as redis:
        store = RedisStore(redis.url, limits)
        try:
            yield redis, store
        finally:
            await store.close()


def play(
    scenario: Callable[[RedisProcess, RedisStore], Awaitable[None]], limits: StoreLimits | None = None
) -> None:
    """On a server of its own."""

    async def with_store() -> None:
        async with redis_store(limits) as (redis, store):
            await scenario(redis, store)

    playing.play(with_store)
