"""Finds the store: the Redis of --redis-url, or a private one in the state directory.

This module does not import ray, which must be set up first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from alignedserve.launch.config import LaunchConfig
from alignedserve.store import StoreAway
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.server import PrivateServer, default_state_dir, find_server, locked

# seconds that Redis gets to end; all that it has confirmed is on the disk, so killing it loses nothing
_END_S = 5.0
_PING_S = 0.02


@dataclass(frozen=True)
class StoreLocation:
    """The store's address. `server` is the system's own Redis, which must be kept running; None for another one."""

    url: str
    server: PrivateServer | None
    # notes the id of a process that must not outlive the system
    note: Callable[[int], None] = lambda pid: None


@contextlib.contextmanager
def locate_store(config: LaunchConfig, note: Callable[[int], None]) -> Iterator[StoreLocation]:
    """Yields the store's location, and locks a private store. `note` gets the ids of its processes. Raises ValueError
    if there can't be one."""
    if config.redis_url is not None:
        try:
            RedisStore(config.redis_url)
        except ValueError as error:
            raise ValueError(f"redis_url: {error}") from None
        yield StoreLocation(config.redis_url, None)
        return
    directory = Path(config.state_dir).expanduser() if config.state_dir else default_state_dir()
    program = find_server()
    with locked(directory.absolute()) as lock:
        server = PrivateServer(program, directory.absolute(), lock)
        yield StoreLocation(server.url, server, note)


async def until_answering(url: str) -> None:
    store = RedisStore(url)
    try:
        while True:
            with contextlib.suppress(StoreAway):
                return await store.ping()
            await asyncio.sleep(_PING_S)
    finally:
        await store.close()


async def end_process(process: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
    if not ended.done():
        process.terminate()
        await asyncio.wait({ended}, timeout=_END_S)
    if not ended.done():
        process.kill()
    await ended
