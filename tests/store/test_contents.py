"""The content of files, in every place: no file exists without it, and unused content is swept."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from alignedserve.store import FileRecord, StoreAway, StoreFull, StoreLimits
from alignedserve.store.base import UNCOMMITTED_S
from alignedserve.store.contents import CHUNK_BYTES, LEFT_BEHIND_S, ContentsApart, ContentsInStore, NewFile
from alignedserve.store.homes import BrokenOff, WatchedHome, make_home
from alignedserve.store.homes.bucket import MAX_WRITERS, PART_BYTES, Objects
from tests import playing
from tests.full_disk import files_of_at_most
from tests.store.homes_for_tests import HOMES, Kept, kept_in
from tests.store.s3_process import BUCKET, S3Process

Play = Callable[..., None]
# Several parts of a bucket's upload, and a piece.
LARGE = 2 * PART_BYTES + 3 * CHUNK_BYTES + 5
APART = HOMES[1:]


@pytest.fixture
def play(tmp_path: Path, s3: S3Process) -> Play:
    def run(
        kind: str, scenario: Callable[[Kept], Awaitable[None]], limits: StoreLimits | None = None
    ) -> None:
        async def with_kept() -> None:
            async with kept_in(kind, tmp_path, s3, limits) as kept:
                await scenario(kept)

        playing.play(with_kept)

    return run


async def put(new: NewFile, content: bytes) -> None:
    for number, start in enumerate(range(0, len(content), CHUNK_BYTES)):
        await new.put(number, content[start : start + CHUNK_BYTES])


def record_of(new: NewFile, content: bytes, owner: str = "") -> FileRecord:
    num_chunks = -(-len(content) // CHUNK_BYTES)
    return FileRecord(
        new.id, "in", "batch", len(content), num_chunks, 100, owner=owner, is_apart=new.is_apart
    )


async def a_file(kept: Kept, content: bytes, owner: str = "") -> FileRecord:
    new = kept.contents.new_file(owner)
    await put(new, content)
    await new.finish()
    await kept.store.commit_file(file := record_of(new, content, owner))
    return file


async def content_of(kept: Kept, file: FileRecord) -> bytes | None:
    found = [await kept.contents.chunk(file, number) for number in range(file.num_chunks)]
    return None if None in found else b"".join(each or b"" for each in found)


async def num_stored(kept: Kept) -> tuple[int, int]:
    """Bytes that are counted in the store, and apart from it."""
    redis = kept.store._redis
    stored, apart = [int(await redis.get(f"alignedserve:{name}") or 0) for name in ("bytes", "bytes-apart")]
    return stored, apart


@pytest.mark.drawn(one_in=4)
@pytest.mark.parametrize("kind", HOMES)
@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, PART_BYTES, LARGE])
def test_content_comes_back_as_it_was_put_and_goes_with_its_file(play: Play, kind: str, size: int) -> None:
    async def scenario(kept: Kept) -> None:
        content = os.urandom(size)
        file = await a_file(kept, content)
        assert file.is_apart == (kind != "redis" and size > 0)
        assert await kept.store.file(file.id) == file and await content_of(kept, file) == content
        assert (await num_stored(kept))[1] == size * file.is_apart
        assert await kept.contents.delete(file.id) == "deleted"
        assert await kept.contents.delete(file.id) == "absent"
        assert not size or await content_of(kept, file) is None
        assert await num_stored(kept) == (0, 0) and not kept.leftovers()

    play(kind, scenario)


@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("kind", HOMES)
@pytest.mark.parametrize("size", [1, LARGE])
def test_what_is_given_up_is_gone_at_once(play: Play, kind: str, size: int) -> None:
    async def scenario(kept: Kept) -> None:
        for is_finished in (False, True):
            new = kept.contents.new_file("")
            await put(new, os.urandom(size))
            if is_finished:
                await new.finish()
            await new.drop()
            await new.drop()
            with pytest.raises(ValueError, match="not all of its"):
                await kept.store.commit_file(record_of(new, bytes(size)))
        assert await num_stored(kept) == (0, 0) and not kept.leftovers()

    play(kind, scenario)


@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("kind", HOMES)
def test_giving_up_what_was_committed_changes_nothing(play: Play, kind: str) -> None:
    async def scenario(kept: Kept) -> None:
        # the answer to the commit was lost, say
        new = kept.contents.new_file("")
        await put(new, content := os.urandom(LARGE))
        await new.finish()
        await kept.store.commit_file(file := record_of(new, content))
        await new.drop()
        assert await content_of(kept, file) == content

    play(kind, scenario)


@pytest.mark.parametrize("kind", HOMES)
def test_what_is_above_a_limit_is_refused_and_results_are_not(play: Play, kind: str) -> None:
    limits = StoreLimits(2000, 1000, max_bytes_apart=2000, max_bytes_apart_of_owner=1000)

    async def scenario(kept: Kept) -> None:
        with pytest.raises(StoreFull, match="yours may have 1000 bytes"):
            await kept.contents.new_file("ann").put(0, bytes(1001))
        new = kept.contents.new_file("ann")
        await new.put(0, bytes(700))
        await kept.contents.new_file("bob").put(0, bytes(1000))
        with pytest.raises(StoreFull, match="yours may have"):
            await new.put(1, bytes(500))
        with pytest.raises(StoreFull, match="all together may have 2000 bytes"):
            await kept.contents.new_file("cid").put(0, bytes(500))
        await kept.contents.new_file("ann", is_bounded=False).put(0, bytes(5000))

    play(kind, scenario, limits)


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("kind", APART)
def test_what_was_left_behind_is_swept_and_nothing_else(play: Play, kind: str) -> None:
    async def scenario(kept: Kept) -> None:
        content = os.urandom(LARGE)
        file, deleted = await a_file(kept, content), await a_file(kept, content)
        # its gateway was killed before the commit, or in the middle; or could not delete what had been a file
        whole, half = kept.contents.new_file(""), kept.contents.new_file("")
        await put(whole, content)
        await whole.finish()
        await put(half, content)
        assert await kept.store.delete_file(deleted.id) == "deleted"
        # somebody else's, in the same place
        home = make_home(kept.place or "")
        for name in ("store-another/file-" + "0" * 24, "store-another/notes"):
            writer = home.writer(name)
            await writer.write(b"mine")
            await writer.finish()
        before = set(kept.leftovers())
        later = ContentsApart(kept.store, WatchedHome(make_home(kept.place or "")))
        # a moment later all is too young, and an hour later what has room is too
        for seconds in (0.0, UNCOMMITTED_S - 60):
            await later.tidy(time.time() + seconds)
            assert set(kept.leftovers()) == before
        later = ContentsApart(kept.store, WatchedHome(make_home(kept.place or "")))
        await later.tidy(time.time() + LEFT_BEHIND_S + 60)
        left = [each for each in kept.leftovers() if each != "part"]
        assert sorted(name.split("/")[-1] for name in left) == sorted([file.id, "file-" + "0" * 24, "notes"])
        assert await content_of(kept, file) == content
        # what is too late to be committed stays nobody's
        for new in (whole, half):
            with pytest.raises(ValueError, match="not all of its"):
                await kept.store.commit_file(record_of(new, content))

    play(kind, scenario)


def test_it_is_swept_though_the_clock_was_set_back(play: Play) -> None:
    """By a month: the next search was due in a month and an hour."""

    async def scenario(kept: Kept) -> None:
        await kept.contents.tidy(time.time() + 30 * 86400)
        left = kept.contents.new_file("")
        await put(left, b"abc")
        await left.finish()
        assert kept.leftovers()
        await kept.contents.tidy(time.time() + LEFT_BEHIND_S + 60)
        assert kept.leftovers() == []

    play("directory", scenario)


def test_two_stores_in_one_place_sweep_only_their_own(tmp_path: Path, s3: S3Process) -> None:
    async def scenario() -> None:
        async with (
            asyncio.timeout(60),
            kept_in("directory", tmp_path, s3) as one,
            kept_in("directory", tmp_path, s3) as other,
        ):
            files = [await a_file(kept, b"abc") for kept in (one, other)]
            for kept in (one, other):
                await kept.contents.tidy(time.time() + LEFT_BEHIND_S + 60)
            found = [await content_of(kept, file) for kept, file in zip((one, other), files, strict=True)]
            assert found == [b"abc", b"abc"]

    asyncio.run(scenario())


def test_files_from_before_content_was_apart_are_read_where_they_are(play: Play) -> None:
    async def scenario(kept: Kept) -> None:
        inside = Kept(kept.redis, kept.store, ContentsInStore(kept.store), None, None)
        old, new = await a_file(inside, b"old"), await a_file(kept, b"new")
        assert await content_of(kept, old) == b"old" and await content_of(kept, new) == b"new"
        # without the option what is apart waits for it, and is not taken for gone
        with pytest.raises(StoreAway, match="--files-at"):
            await content_of(inside, new)
        assert await kept.contents.delete(old.id) == "deleted" and await num_stored(kept) != (0, 0)

    play("directory", scenario)


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("kind", APART)
def test_a_place_that_is_away_is_said_and_used_again_when_it_is_back(play: Play, kind: str) -> None:
    async def scenario(kept: Kept) -> None:
        content = os.urandom(LARGE)
        file = await a_file(kept, content)
        new = kept.contents.new_file("")
        await put(new, content)
        lose(kept)
        with pytest.raises(BrokenOff):
            await new.finish()
        await new.drop()
        with pytest.raises(BrokenOff):
            await put(kept.contents.new_file(""), content)
        if kept.s3:
            with pytest.raises(StoreAway):
                await kept.contents.chunk(file, 0)
            kept.s3.start()
        # the file goes whether its content can be deleted or not
        assert await kept.contents.delete(file.id) == "deleted"
        bring_back(kept)
        assert await content_of(kept, await a_file(kept, content)) == content

    play(kind, scenario)


def test_a_full_disk_is_told_and_keeps_nothing(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(kept: Kept) -> None:
        content = os.urandom(LARGE)
        for _ in range(3):
            new = kept.contents.new_file("")
            with files_of_at_most(CHUNK_BYTES + 100):
                with pytest.raises(BrokenOff, match="the directory of files: File too large"):
                    await put(new, content)
                await new.drop()
            assert kept.leftovers() == []
        assert await content_of(kept, await a_file(kept, content)) == content

    play("directory", scenario)
    assert caplog.messages == ["the directory of files can't be used: File too large"]


def test_a_bucket_that_refuses_is_not_one_without_the_file(kept_bucket: Objects) -> None:
    """Its digits are not its status: such a file was once taken for gone, and its batch failed."""
    with pytest.raises(StoreAway, match="403"):
        asyncio.run(kept_bucket.read("in/416/NoSuchBucket", 0, 10))


@pytest.fixture
def kept_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    """One that allows nothing."""

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        def log_message(self, format: str, *args: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        try:
            yield Objects(BUCKET)
        finally:
            server.shutdown()
            thread.join()


def lose(kept: Kept) -> None:
    if kept.s3:
        kept.s3.kill()
    elif kept.place:
        # a file is in its way
        Path(kept.place).rename(f"{kept.place}-away")
        Path(kept.place).touch()


def bring_back(kept: Kept) -> None:
    if not kept.s3 and kept.place:
        Path(kept.place).unlink()
        Path(f"{kept.place}-away").rename(kept.place)


def test_a_bucket_has_so_many_writers_at_a_time(play: Play) -> None:
    async def scenario(kept: Kept) -> None:
        writing = [kept.contents.new_file("") for _ in range(MAX_WRITERS)]
        for new in writing:
            await new.put(0, b"x")
        one_more = kept.contents.new_file("")
        with pytest.raises(StoreAway, match="16 files are being written"):
            await one_more.put(0, b"x")
        await writing[0].drop()
        await one_more.put(0, b"x")
        for new in (*writing, one_more):
            await new.drop()
        assert not kept.leftovers()

    play("bucket", scenario)


def test_what_a_directory_keeps_is_this_users_alone(play: Play) -> None:
    async def scenario(kept: Kept) -> None:
        new = kept.contents.new_file("")
        await new.put(0, b"secret")
        assert kept.place
        assert [oct(each.stat().st_mode & 0o777) for each in Path(kept.place).rglob("*")] == [
            "0o700",
            "0o600",
        ]

    play("directory", scenario)
