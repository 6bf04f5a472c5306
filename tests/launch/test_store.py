"""The private Redis: it is kept running, its data is kept, and nothing else of it is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alignedserve.launch.config import LaunchConfig
from alignedserve.launch.process_supervisor import ProcessFailed
from alignedserve.launch.store import StoreLocation, locate_store
from alignedserve.launch.store_supervisor import (
    MAX_RETRY_S,
    RETRY_S,
    STEADY_S,
    RestartPauses,
    StoreSupervisor,
)
from alignedserve.process import HANG_S
from alignedserve.store import FileId, Store, StoreAway
from alignedserve.store.redis_store import RedisStore


@pytest.fixture
def state() -> Iterator[Path]:
    """Directly in /tmp: a socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="state-", dir="/tmp") as directory:
        yield Path(directory)


class Kept:
    def __init__(self, location: StoreLocation, store: Store) -> None:
        self.location = location
        self.store = store
        self.lines: list[str] = []
        self.said = asyncio.Event()

    def say(self, line: str) -> None:
        self.lines.append(line)
        self.said.set()

    async def retried(self, call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        while True:
            with contextlib.suppress(StoreAway):
                return await call(*args)
            await asyncio.sleep(0.05)

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


def note_nothing(pid: int) -> None:
    """These tests end what they start."""


def test_a_url_that_is_none_is_named() -> None:
    with (
        pytest.raises(ValueError, match="redis_url: Redis URL must"),
        locate_store(LaunchConfig(redis_url="garbage"), note_nothing),
    ):
        pass


def play(state: Path, scenario: Callable[[Kept], Awaitable[None]], silence_s: float = HANG_S) -> Kept:
    async def within_time() -> Kept:
        with locate_store(LaunchConfig(state_dir=str(state)), note_nothing) as location:
            kept = Kept(location, RedisStore(location.url))
            supervisor = StoreSupervisor(location, kept.say, silence_s)
            supervising = asyncio.create_task(supervisor.supervise())
            async with asyncio.timeout(60):
                await scenario(kept)
                await kept.store.close()
                supervisor.stop()
                await supervising
            return kept

    return asyncio.run(within_time())


def test_it_is_started_again_with_all_that_was_in_it(state: Path) -> None:
    async def scenario(kept: Kept) -> None:
        first = await kept.until_up(1)
        await kept.store.put_chunk(FileId("file-1"), "", 0, b"x")
        os.kill(first, signal.SIGKILL)
        assert await kept.until_up(2) != first
        assert await kept.store.chunk(FileId("file-1"), 0) == b"x"

    kept = play(state, scenario)
    assert [line.split(" after")[0] for line in kept.lines] == [
        "redis is up",
        "redis is down; starting it again (signal 9)",
        "redis is up",
    ]

    async def later(kept: Kept) -> None:
        await kept.until_up(1)
        assert await kept.store.chunk(FileId("file-1"), 0) == b"x"

    play(state, later)


def test_one_that_hangs_is_killed_and_started_again(state: Path) -> None:
    async def scenario(kept: Kept) -> None:
        first = await kept.until_up(1)
        await kept.store.put_chunk(FileId("file-1"), "", 0, b"x")
        os.kill(first, signal.SIGSTOP)
        assert await kept.until_up(2) != first
        assert await kept.store.chunk(FileId("file-1"), 0) == b"x"

    kept = play(state, scenario, silence_s=2)
    assert [line.split(" after")[0] for line in kept.lines[1:3]] == [
        "redis answers nothing for 2 s; killing it",
        "redis is down; starting it again (signal 9)",
    ]


def test_that_it_came_up_is_not_yet_a_success() -> None:
    pauses = RestartPauses()
    found = [pauses.after(0.5) for _ in range(29)]
    assert found[:4] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S] and found[-1] == MAX_RETRY_S
    assert sum(pause < MAX_RETRY_S for pause in found) == 7
    assert [pauses.after(STEADY_S), pauses.after(0.5)] == [RETRY_S, 2 * RETRY_S]


@pytest.fixture
def small_disk(state: Path) -> Iterator[Path]:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(state)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no disk of 8 MB can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield state
    finally:
        subprocess.run(["umount", "--lazy", str(state)], check=True)


def test_a_full_disk_is_said_and_when_there_is_room_again_it_goes_on(small_disk: Path) -> None:
    filler = small_disk / "filler"

    async def scenario(kept: Kept) -> None:
        await kept.until_up(1)
        await kept.store.put_chunk(FileId("file-1"), "", 0, b"x")
        filler.write_bytes(b"x" * (5 << 20))
        with pytest.raises(StoreAway):
            for number in range(9):
                await kept.store.put_chunk(FileId("file-2"), "", number, b"x" * (1 << 20))
        assert kept.store.is_down
        await kept.until_up(2)
        # it can be read, and not written: that is not yet well
        assert await kept.retried(kept.store.chunk, FileId("file-1"), 0) == b"x"
        assert kept.store.is_down
        filler.unlink()
        await kept.retried(kept.store.probe)
        assert not kept.store.is_down
        assert await kept.store.chunk(FileId("file-1"), 0) == b"x"

    kept = play(small_disk, scenario)
    ends = [line for line in kept.lines if line.startswith("redis is down; starting it again")]
    assert f"the disk of {small_disk} is full" in ends[0]


def test_it_ends_with_the_system(state: Path) -> None:
    pids = []

    async def scenario(kept: Kept) -> None:
        pids.append(await kept.until_up(1))

    play(state, scenario)
    assert not Path(f"/proc/{pids[0]}").exists()


def test_a_second_system_is_told_in_one_line(state: Path) -> None:
    config = LaunchConfig(state_dir=str(state))
    with (
        locate_store(config, note_nothing),
        pytest.raises(ValueError, match=r"^state_dir='.*': in use by another server; [^\n]*$"),
        locate_store(config, note_nothing),
    ):
        pass


def test_data_that_it_can_not_read_is_said_with_its_own_words(state: Path) -> None:
    async def scenario(kept: Kept) -> None:
        await kept.until_up(1)
        await kept.store.put_chunk(FileId("file-1"), "", 0, b"x")

    play(state, scenario)
    for path in (state / "redis" / "appendonlydir").glob("*.manifest"):
        path.write_text("nonsense\n")

    async def starting() -> None:
        with locate_store(LaunchConfig(state_dir=str(state)), note_nothing) as location:
            await StoreSupervisor(location, print).supervise()

    with pytest.raises(ProcessFailed, match="redis does not start: .*manifest"):
        asyncio.run(starting())


def test_a_redis_that_is_named_is_used_and_not_kept() -> None:
    with locate_store(LaunchConfig(redis_url="redis://127.0.0.1:1/0"), note_nothing) as location:
        assert location.server is None and location.url == "redis://127.0.0.1:1/0"
    with (
        pytest.raises(ValueError, match="Redis URL must specify"),
        locate_store(LaunchConfig(redis_url="nonsense"), note_nothing),
    ):
        pass
