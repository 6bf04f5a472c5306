"""Responses on a real Redis: kept, replaced by whoever holds them, counted, and gone in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from alignedserve.store import LeaseLost, ResponseId, ResponseRecord, StoreFull, StoreLimits, TooManyJobs
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.responses import ResponseStore
from tests.store import redis_process
from tests.store.redis_process import RedisProcess

NOW = 1_000_000


def record(
    number: int, status: str = "completed", owner: str = "a", expires_at: int = NOW + 100
) -> ResponseRecord:
    return ResponseRecord(
        id=ResponseId(f"resp_{number}"),
        owner=owner,
        status=status,  # type: ignore[arg-type]
        created_at=NOW + number,
        expires_at=expires_at,
        input_items=b"[]",
        body=b'{"x": 1}',
        call=b"" if status == "completed" else b"{}",
    )


def play(
    scenario: Callable[[ResponseStore, RedisStore], Awaitable[None]], limits: StoreLimits | None = None
) -> None:
    async def with_responses(_: RedisProcess, store: RedisStore) -> None:
        await scenario(store.responses, store)

    redis_process.play(with_responses, limits)


async def num_bytes(store: RedisStore) -> int:
    return int(await store._redis.get("alignedserve:bytes") or 0)


async def leftovers(store: RedisStore) -> set[str]:
    """The names of all keys that hold more than a count."""
    keys = {key.decode() for key in await store._redis.keys("alignedserve:*")}
    return {key for key in keys if not key.startswith(("alignedserve:bytes", "alignedserve:sequence"))}


def test_what_is_added_is_there_until_it_is_deleted() -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        for _ in range(2):
            await responses.add(record(1))
        assert await responses.get(ResponseId("resp_1")) == record(1)
        assert await responses.get(ResponseId("resp_2")) is None
        assert await num_bytes(store) > 0 and await responses.take("me", 5, 10) == []
        for _ in range(2):
            await responses.delete(record(1))
        assert await num_bytes(store) == 0 and await leftovers(store) == set()

    play(scenario)


def test_one_that_is_not_over_is_somebodys() -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        for number in (2, 1):
            await responses.add(record(number, "queued"))
        (first,) = await responses.take("me", 60, 1)
        assert first.job_id == "resp_1"
        (second,) = await responses.take("you", 60, 5)
        assert second.job_id == "resp_2" and await responses.take("you", 60, 5) == []
        assert await responses.renew([first, second], 60) == ["held", "held"]
        begun = replace(record(1, "queued"), body=b'{"x": 2}')
        assert await responses.replace(record(1, "queued"), begun, first)
        assert not await responses.replace(record(1, "queued"), begun, first)
        with pytest.raises(LeaseLost):
            await responses.replace(begun, record(1), second)
        assert await responses.replace(begun, record(1), first)
        assert await responses.renew([first], 60) == ["lost"]
        with pytest.raises(LeaseLost):
            await responses.begin(first)
        # somebody else may end it too: it is cancelled
        assert await responses.replace(record(2, "queued"), record(2), None)
        assert await responses.renew([second], 60) == ["lost"]
        for number in (1, 2):
            await responses.delete(record(number))
        assert await num_bytes(store) == 0 and await leftovers(store) == set()

    play(scenario)


def test_a_lease_lapses_and_how_often_is_known() -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        await responses.add(record(1, "queued"))
        for num_falls in range(3):
            while not (leases := await responses.take("me", 0.01, 1)):
                await asyncio.sleep(0.005)
            assert await responses.begin(leases[0]) == num_falls
        await responses.release(leases[0])
        (lease,) = await responses.take("me", 60, 1)
        assert await responses.begin(lease) == 2

    play(scenario)


def test_there_are_limits() -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        await responses.add(record(1, "queued"))
        with pytest.raises(TooManyJobs, match="yours|of your"):
            await responses.add(record(2, "queued"))
        await responses.add(record(3, "queued", owner="b"))
        with pytest.raises(TooManyJobs):
            await responses.add(record(4, "queued", owner="c"))
        await responses.add(record(5))
        with pytest.raises(StoreFull):
            await responses.add(replace(record(6), body=b"x" * 5000))

    limits = StoreLimits(5000, None, max_open_jobs=2, max_open_jobs_of_owner=1)
    play(scenario, limits)


def test_those_that_have_expired_are_found() -> None:
    async def scenario(responses: ResponseStore, store: RedisStore) -> None:
        for number in range(3):
            await responses.add(record(number, expires_at=NOW + number))
        assert await responses.expired(NOW + 1) == [record(n, expires_at=NOW + n) for n in (0, 1)]

    play(scenario)
