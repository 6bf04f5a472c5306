"""Whether a private Redis answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from alignedserve.store.redis_store import RedisStore
from alignedserve.store.server import PrivateServer
from tests.store.redis_process import redis_running


def test_redis_answers_until_it_hangs_or_is_gone() -> None:
    async def scenario() -> None:
        async with redis_running() as redis:
            assert await redis.server.answers(30.0)
            redis.pause()
            assert not await redis.server.answers(0.1)
            redis.go_on()
            assert await redis.server.answers(30.0)
            await redis.kill()
            assert not await redis.server.answers(30.0)

    asyncio.run(scenario())


@pytest.mark.parametrize(("said", "is_answer"), [(b"-LOADING it is\r\n", True), (b"", False)])
def test_an_error_is_an_answer_and_an_end_is_none(tmp_path: Path, said: bytes, is_answer: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"PING\r\n"
        writer.write(said)
        writer.close()

    async def scenario() -> None:
        server = PrivateServer("redis-server", tmp_path, lock=-1)
        async with await asyncio.start_unix_server(answer, server.socket):
            assert await server.answers(30.0) is is_answer

    asyncio.run(scenario())


async def until_connected(watching: Redis, num: int) -> None:
    """Redis takes a moment to see the end of a connection."""
    async with asyncio.timeout(30.0):
        while len(await watching.client_list()) != num:
            await asyncio.sleep(0.01)


def test_a_store_that_is_closed_keeps_no_connection() -> None:
    async def scenario() -> None:
        async with redis_running() as redis, Redis.from_url(redis.url) as watching:
            await until_connected(watching, 1)
            store = RedisStore(redis.url)
            await store.ping()
            await until_connected(watching, 2)
            await store.close()
            await until_connected(watching, 1)

    asyncio.run(scenario())
