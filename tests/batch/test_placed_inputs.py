"""Files that are read where they are: those under a prefix, as long as they are the same, and no others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignedserve.batch.placed_inputs import InputChanged, PlacedInputs
from alignedserve.store import PlacedInput, StoreAway
from alignedserve.types import InvalidRequest
from tests.store.s3_process import BUCKET, S3Process, s3_running

REFUSED = "files are read in place only under"
NO_FILE = "there is no such file"


def find(inputs: PlacedInputs, url: str) -> PlacedInput:
    return asyncio.run(inputs.find(url))


def read(inputs: PlacedInputs, placed: PlacedInput, start: int = 0, num_bytes: int | None = None) -> bytes:
    size = placed.num_bytes - start if num_bytes is None else num_bytes
    return asyncio.run(inputs.read(placed, start, size))


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Process]:
    with s3_running() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What may be read is in `in`; everything else is not."""
    inside, outside = tmp_path / "in", tmp_path / "out"
    for each in (inside / "deep", outside):
        each.mkdir(parents=True)
        (each / "file").write_bytes(b"0123456789")
    (inside / "file").write_bytes(b"0123456789")
    (tmp_path / "in-other").write_bytes(b"x")
    return tmp_path


def test_a_file_under_a_prefix_is_found_and_read(folder: Path) -> None:
    inputs = PlacedInputs([str(folder / "in")], 10)
    (folder / "in" / "a b?").write_bytes(b"abc")
    (folder / "in" / "link").symlink_to("deep/file")
    for name, content in (("file", b"0123456789"), ("a%20b%3F", b"abc"), ("deep/../link", b"0123456789")):
        placed = find(inputs, f"file://{folder}/in/{name}")
        assert placed.num_bytes == len(content) and read(inputs, placed) == content
        assert read(inputs, placed, 1, 2) == content[1:3]


def test_a_prefix_may_be_a_link_or_a_url(folder: Path) -> None:
    (folder / "alias").symlink_to("in")
    for prefix in ("alias", "in/deep/.."):
        for text in (f"{folder}/{prefix}", f"file://{folder}/{prefix}"):
            inputs = PlacedInputs([text])
            assert find(inputs, f"file://{folder}/in/file").num_bytes == 10


@pytest.mark.parametrize(
    "path",
    [
        *("out/file", "out/nothing", "in/../out/file", "in/%2e%2e/out/file", "in/deep/../../out/file"),
        *("in-other", "in/to-file", "in/to-folder/file", "in/to-folder/nothing", "in/to-root/etc/passwd"),
        *("", "in/..", "in/%2E%2E%2Fout/file", "in/loop/../../out/file"),
    ],
)
def test_what_is_elsewhere_is_refused_whether_it_is_there_or_not(folder: Path, path: str) -> None:
    (folder / "in" / "to-file").symlink_to(folder / "out" / "file")
    (folder / "in" / "to-folder").symlink_to("../out")
    (folder / "in" / "to-root").symlink_to("/")
    (folder / "in" / "loop").symlink_to(".")
    with pytest.raises(InvalidRequest, match=REFUSED) as error:
        find(PlacedInputs([str(folder / "in")]), f"file://{folder}/{path}")
    assert str(error.value).endswith(f"{folder}/in")


def test_what_is_no_file_that_can_be_read_is_said_to_be_none(folder: Path) -> None:
    inside = folder / "in"
    os.mkfifo(inside / "pipe")
    (inside / "loop").symlink_to("loop")
    inputs = PlacedInputs([str(inside)])
    for name in ("nothing", "deep", "pipe", "file/file", "", "x" * 300):
        with pytest.raises((InvalidRequest, StoreAway), match=f"{NO_FILE}|File name too long"):
            find(inputs, f"file://{inside}/{name}")
    with pytest.raises(InvalidRequest, match=f"{NO_FILE}|{REFUSED}"):
        find(inputs, f"file://{inside}/loop")


def test_a_link_that_is_put_in_its_way_afterwards_leads_nowhere(folder: Path) -> None:
    inputs = PlacedInputs([str(folder / "in")])
    placed = find(inputs, f"file://{folder}/in/deep/file")
    (folder / "in" / "deep").rename(folder / "in" / "moved")
    (folder / "in" / "deep").symlink_to("../out")
    with pytest.raises(InputChanged):
        read(inputs, placed)


def test_a_file_that_has_changed_is_not_read(folder: Path) -> None:
    inputs, file = PlacedInputs([str(folder)]), folder / "in" / "file"
    placed = find(inputs, f"file://{file}")
    stat = file.stat()

    def replace() -> None:
        """By another file of the same size and age."""
        file.unlink()
        file.write_bytes(b"abcdefghij")
        os.utime(file, ns=(0, stat.st_mtime_ns))

    changes: list[Callable[[], object]] = [
        lambda: file.write_bytes(b"012345678"),
        lambda: os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1)),
        replace,
        file.unlink,
    ]
    for change in changes:
        keep = folder / "kept"
        keep.unlink(missing_ok=True)
        os.link(file, keep)
        assert read(inputs, placed) == b"0123456789"
        change()
        with pytest.raises(InputChanged):
            read(inputs, placed)
        file.unlink(missing_ok=True)
        keep.rename(file)
        if file.read_bytes() != b"0123456789":
            file.write_bytes(b"0123456789")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_file_has_so_many_bytes_at_most(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="has 10 bytes, and may have 9"):
        find(PlacedInputs([str(folder)], 9), f"file://{folder}/in/file")


def test_without_prefixes_there_are_none(folder: Path) -> None:
    for url in (f"file://{folder}/in/file", "s3://bucket/key"):
        with pytest.raises(InvalidRequest, match="this server reads no URLs"):
            find(PlacedInputs([]), url)
    with pytest.raises(InvalidRequest, match="must begin with s3://"):
        find(PlacedInputs([str(folder)]), "http://127.0.0.1/file")


def test_an_object_under_a_prefix_is_found_and_read_until_it_changes(s3: S3Process) -> None:
    inputs = PlacedInputs([f"s3://{BUCKET}/in"])
    for key in ("in/a", "in-other", "out"):
        s3.put(key, b"0123456789")
    placed = find(inputs, f"s3://{BUCKET}/in/a")
    assert placed.num_bytes == 10 and read(inputs, placed) == b"0123456789"
    assert read(inputs, placed, 3, 4) == b"3456"
    for key in ("in-other", "out", "nothing", ""):
        with pytest.raises(InvalidRequest, match=REFUSED):
            find(inputs, f"s3://{BUCKET}/{key}")
    with pytest.raises(InvalidRequest, match=REFUSED):
        find(inputs, "s3://another/in/a")
    with pytest.raises(InvalidRequest, match=NO_FILE):
        find(inputs, f"s3://{BUCKET}/in/nothing")
    for content in (b"abcdefghij", b"0"):
        s3.put("in/a", content)
        with pytest.raises(InputChanged):
            read(inputs, placed)
