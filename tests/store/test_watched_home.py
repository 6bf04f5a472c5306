"""A home knows whether it could be reached when it was last tried, and took writes."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from alignedserve.store import StoreAway
from alignedserve.store.homes import WatchedHome, make_home
from tests.full_disk import files_of_at_most


def test_it_is_down_from_a_call_that_fails_to_one_that_does_not(tmp_path: Path) -> None:
    place = tmp_path / "files"

    async def scenario() -> None:
        home = WatchedHome(make_home(str(place)))
        await home.probe("one")
        assert not home.is_down and not list(place.iterdir())
        # a file in the directory's place
        shutil.rmtree(place)
        place.write_text("")
        with pytest.raises(StoreAway):
            await home.probe("two")
        assert home.is_down
        with pytest.raises(StoreAway):
            await home.read("two/x", 0, 1)
        assert home.is_down
        place.unlink()
        place.mkdir()
        assert await home.read("two", 0, 1) is None
        # It was last asked to write when it was away.
        assert home.is_down
        await home.probe("three")
        assert not home.is_down
        async for _ in home.listed("nobody's"):
            raise AssertionError("there is nothing")
        assert not home.is_down

    asyncio.run(scenario())


def test_on_a_full_disk_it_is_down_though_all_else_succeeds(tmp_path: Path) -> None:
    async def scenario() -> None:
        home = WatchedHome(make_home(str(tmp_path / "files")))
        writer = home.writer("folder/one")
        await writer.write(b"some")
        await writer.finish()
        with files_of_at_most(4), pytest.raises(StoreAway):
            await home.probe("folder/two")
        assert await home.read("folder/one", 0, 4) == b"some"
        await home.delete("folder/one")
        assert home.is_down
        await home.probe("folder/two")
        assert not home.is_down

    asyncio.run(scenario())


@pytest.mark.parametrize("is_one", [True, False])
def test_a_writer_that_fails_tells_it(tmp_path: Path, is_one: bool) -> None:
    place = tmp_path / "files"

    async def scenario() -> None:
        home = WatchedHome(make_home(str(place)))
        writer = home.writer("folder/one")
        await writer.write(b"some")
        if not is_one:
            shutil.rmtree(place)
            with pytest.raises(StoreAway):
                await writer.finish()
        else:
            await writer.finish()
            assert await home.read("folder/one", 0, 4) == b"some"
        assert home.is_down is not is_one
        await writer.abort()

    asyncio.run(scenario())


def test_a_piece_that_is_written_does_not_hide_that_files_cannot_be_finished(tmp_path: Path) -> None:
    place = tmp_path / "files"

    async def scenario() -> None:
        home = WatchedHome(make_home(str(place)))
        first, second = home.writer("folder/one"), home.writer("folder/two")
        await first.write(b"some")
        await second.write(b"some")
        shutil.rmtree(place)
        with pytest.raises(StoreAway):
            await first.finish()
        # The file was opened before: there is room in it still.
        await second.write(b"more")
        assert home.is_down
        with pytest.raises(StoreAway):
            await second.finish()
        await first.abort()
        await second.abort()
        await home.probe("three")
        assert not home.is_down

    asyncio.run(scenario())


def test_a_home_that_was_never_tried_is_not_down(tmp_path: Path) -> None:
    assert not WatchedHome(make_home(str(tmp_path))).is_down
