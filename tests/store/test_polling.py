"""A gateway looks for work until it is stopped, whatever happens."""

from __future__ import annotations

import asyncio
import logging

import pytest

from alignedserve.store import StoreAway
from alignedserve.store.polling import StorePoller

NEVER_S = 1e6


def test_it_looks_at_once_and_when_it_is_woken() -> None:
    async def scenario() -> None:
        looked: asyncio.Queue[None] = asyncio.Queue()
        looking = StorePoller(lambda: looked.put(None), NEVER_S, "jobs")
        running = asyncio.create_task(looking.run())
        await looked.get()
        looking.wake()
        await looked.get()
        assert not running.done()
        looking.stop()
        await running
        assert looked.empty()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_it_looks_every_so_often_and_goes_on_after_any_error(caplog: pytest.LogCaptureFixture) -> None:
    """A store that is away is what can be expected; all else is told of."""
    raised: list[Exception] = [StoreAway("it restarts"), RuntimeError("a bug")]

    async def scenario() -> None:
        async def look() -> None:
            if raised:
                raise raised.pop(0)
            looking.stop()

        looking = StorePoller(look, 0.001, "jobs")
        await looking.run()

    caplog.set_level(logging.INFO, "alignedserve.store.polling")
    asyncio.run(asyncio.wait_for(scenario(), 60))
    said = [record.getMessage() for record in caplog.records if record.name == "alignedserve.store.polling"]
    assert said == ["looking for jobs failed, and is tried again"] and not raised


def test_one_that_is_stopped_before_it_begins_does_not_look() -> None:
    async def scenario() -> None:
        looking = StorePoller(lambda: pytest.fail("it looked"), NEVER_S, "jobs")
        looking.stop()
        await looking.run()

    asyncio.run(asyncio.wait_for(scenario(), 60))
