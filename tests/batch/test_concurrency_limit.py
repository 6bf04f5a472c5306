"""Lines that run, by number and by bytes."""

from __future__ import annotations

import asyncio
import random

import pytest

from alignedserve.batch.concurrency_limit import ConcurrencyLimit


async def entered(*asking: asyncio.Task[None]) -> list[bool]:
    for _ in range(3):
        await asyncio.sleep(0)
    return [each.done() for each in asking]


def test_there_is_room_for_so_many_and_for_so_many_bytes() -> None:
    async def scenario() -> None:
        limit = ConcurrencyLimit(2, 100)
        asking = [asyncio.create_task(limit.acquire(size)) for size in (60, 50, 10, 5)]
        # the third would fit, and waits for its turn
        assert await entered(*asking) == [True, False, False, False]
        limit.release(60)
        assert await entered(*asking) == [True, True, True, False]
        limit.release(10)
        limit.release(50)
        assert await entered(*asking) == [True] * 4
        limit.release(5)
        assert limit.is_empty

    asyncio.run(scenario())


def test_what_is_larger_than_the_room_has_it_to_itself() -> None:
    async def scenario() -> None:
        limit = ConcurrencyLimit(2, 100)
        await limit.acquire(1)
        asking = [asyncio.create_task(limit.acquire(size)) for size in (1000, 1)]
        assert await entered(*asking) == [False, False]
        limit.release(1)
        assert await entered(*asking) == [True, False]
        limit.release(1000)
        assert await entered(*asking) == [True, True]

    asyncio.run(scenario())


def test_who_leaves_and_who_is_cancelled_at_once_do_not_meet() -> None:
    async def scenario() -> None:
        limit = ConcurrencyLimit(1, 100)
        await limit.acquire(1)
        asking = [asyncio.create_task(limit.acquire(1)) for _ in range(2)]
        await entered(*asking)
        asking[0].cancel()
        limit.release(1)
        await entered(*asking)
        assert asking[0].cancelled() and asking[1].done()
        # and who is let in and cancelled at once gives it back
        late = asyncio.create_task(limit.acquire(1))
        await entered(late)
        limit.release(1)
        late.cancel()
        await entered(late)
        assert late.cancelled() and limit.is_empty

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(20))
def test_who_is_cancelled_leaves_nothing_behind(seed: int) -> None:
    async def scenario() -> None:
        choose = random.Random(seed)
        limit = ConcurrencyLimit(3, 100)

        async def stay(size: int) -> None:
            await limit.acquire(size)
            try:
                await asyncio.sleep(0)
            finally:
                limit.release(size)

        running = [asyncio.create_task(stay(choose.randint(0, 150))) for _ in range(60)]
        for _ in range(200):
            choose.choice(running).cancel() if choose.random() < 0.1 else await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await asyncio.gather(*running, return_exceptions=True)
        assert limit.is_empty

    asyncio.run(scenario())


def test_while_windows_are_tight_the_job_that_expires_first_goes_first() -> None:
    async def scenario() -> None:
        is_tight = True
        limit = ConcurrencyLimit(1, 100, lambda: is_tight)
        await limit.acquire(1)
        asking = [asyncio.create_task(limit.acquire(1, expires_at)) for expires_at in (30, 10, 20)]
        assert await entered(*asking) == [False] * 3
        limit.release(1)
        assert await entered(*asking) == [False, True, False]
        # what has waited longest goes next as soon as they are not
        is_tight = False
        limit.release(1)
        assert await entered(*asking) == [True, True, False]
        limit.release(1)
        assert await entered(*asking) == [True] * 3
        limit.release(1)
        assert limit.is_empty

    asyncio.run(scenario())
