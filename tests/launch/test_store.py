"""The private Redis: it is kept running, what is in it stays, and nothing of it is left but that."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from alignedserve.launch.config import ServeConfig
from alignedserve.launch.keeper import PartFailed
from alignedserve.launch.store import StoreSite, store_site
from alignedserve.launch.store_keeper import StoreKeeper
from alignedserve.store import FileId, Store
from alignedserve.store.redis_store import RedisStore


@pytest.fixture
def state() -> Iterator[Path]:
    """Directly in /tmp: a socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="state-", dir="/tmp") as directory:
        yield Path(directory)


class Kept:
    def __init__(self, site: StoreSite, store: Store) -> None:
        self.site = site
        self.store = store
        self.lines: list[str] = []
        self.said = asyncio.Event()

    def say(self, line: str) -> None:
        self.lines.append(line)
        self.said.set()

    async def until_up(self, count: int) -> int:
        """Its process id, when it has come up so often."""
        while True:
            pids = [
                found[1] for line in self.lines if (found := re.search(r"is up after .* pid (\d+)", line))
            ]
            if len(pids) >= count:
                return int(pids[-1])
            self.said.clear()
            await self.said.wait()


def test_a_url_that_is_none_is_named() -> None:
    with (
        pytest.raises(ValueError, match="redis_url: Redis URL must"),
        store_site(ServeConfig(redis_url="garbage"), "alignedserve-test"),
    ):
        pass


def play(state: Path, scenario: Callable[[Kept], Awaitable[None]]) -> Kept:
    async def within_time() -> Kept:
        with store_site(ServeConfig(state_dir=str(state)), "alignedserve-test") as site:
            kept = Kept(site, RedisStore(site.url))
            keeper = StoreKeeper(site, kept.say)
            keeping = asyncio.create_task(keeper.keep())
            async with asyncio.timeout(30):
                await scenario(kept)
                await kept.store.close()
                keeper.stop()
                await keeping
            return kept

    return asyncio.run(within_time())


def test_it_is_started_again_with_all_that_was_in_it(state: Path) -> None:
    async def scenario(kept: Kept) -> None:
        first = await kept.until_up(1)
        await kept.store.put_chunk(FileId("file-1"), 0, b"x")
        os.kill(first, signal.SIGKILL)
        assert await kept.until_up(2) != first
        assert await kept.store.chunk(FileId("file-1"), 0) == b"x"

    kept = play(state, scenario)
    assert [line.split(" after")[0] for line in kept.lines] == [
        "redis is up",
        "redis is down; starting it again",
        "redis is up",
    ]

    async def later(kept: Kept) -> None:
        await kept.until_up(1)
        assert await kept.store.chunk(FileId("file-1"), 0) == b"x"

    play(state, later)


def test_it_ends_with_the_system(state: Path) -> None:
    pids = []

    async def scenario(kept: Kept) -> None:
        pids.append(await kept.until_up(1))

    play(state, scenario)
    assert not Path(f"/proc/{pids[0]}").exists()


def test_a_second_system_is_told_in_one_line(state: Path) -> None:
    config = ServeConfig(state_dir=str(state))
    with (
        store_site(config, "alignedserve-test"),
        pytest.raises(ValueError, match=r"^state_dir='.*': another system uses it; [^\n]*$"),
        store_site(config, "alignedserve-test-2"),
    ):
        pass


def test_data_that_it_can_not_read_is_said_with_its_own_words(state: Path) -> None:
    async def scenario(kept: Kept) -> None:
        await kept.until_up(1)
        await kept.store.put_chunk(FileId("file-1"), 0, b"x")

    play(state, scenario)
    for path in (state / "redis" / "appendonlydir").glob("*.manifest"):
        path.write_text("nonsense\n")

    async def starting() -> None:
        with store_site(ServeConfig(state_dir=str(state)), "alignedserve-test") as site:
            await StoreKeeper(site, print).keep()

    with pytest.raises(PartFailed, match="redis does not start: .*manifest"):
        asyncio.run(starting())


def test_a_redis_that_is_named_is_used_and_not_kept() -> None:
    with store_site(ServeConfig(redis_url="redis://127.0.0.1:1/0"), "alignedserve-test") as site:
        assert site.server is None and site.url == "redis://127.0.0.1:1/0"
    with (
        pytest.raises(ValueError, match="Redis URL must specify"),
        store_site(ServeConfig(redis_url="nonsense"), "alignedserve-test"),
    ):
        pass
