"""The pool's memory is spread over nodes, and all allocated before anything uses it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from io import BufferedRandom
from pathlib import Path

import numpy as np
import pytest

from alignedserve.kvpool import pages

NUM_BYTES = 8 << 20
SHM = Path("/dev/shm")
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
OF_ADDRESS, INTERLEAVE = 2, 3
# Of Linux.
MADV_POPULATE_READ = 22


@pytest.fixture
def file() -> Iterator[int]:
    number = os.memfd_create("pages")
    yield number
    os.close(number)


def policy(memory: mmap.mmap) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    mode, address = ctypes.c_int(-1), np.frombuffer(memory, np.uint8).ctypes.data
    number = GET_MEMPOLICY[platform.machine()]
    nothing = ctypes.c_void_p(0), ctypes.c_ulong(0)
    arguments = (ctypes.byref(mode), *nothing, ctypes.c_ulong(address), ctypes.c_ulong(OF_ADDRESS))
    assert libc.syscall(number, *arguments) == 0, os.strerror(ctypes.get_errno())
    return mode.value


def spread_or_skip(memory: mmap.mmap, nodes: list[int]) -> None:
    if not nodes:
        pytest.skip("this system does not say which nodes it has")
    ctypes.set_errno(0)
    if not pages.spread(memory, nodes):
        assert ctypes.get_errno() in (0, errno.ENOSYS, errno.EPERM), os.strerror(ctypes.get_errno())
        pytest.skip("this system lets nobody say where memory is")


def test_pages_of_the_file_come_from_all_nodes_in_turn_whoever_maps_it(file: int) -> None:
    os.ftruncate(file, NUM_BYTES)
    nodes = pages.memory_nodes()
    with mmap.mmap(file, NUM_BYTES) as memory:
        spread_or_skip(memory, nodes)
        assert policy(memory) == INTERLEAVE
    with mmap.mmap(file, NUM_BYTES) as again:
        assert policy(again) == INTERLEAVE


def test_a_node_that_is_not_there_changes_nothing(file: int) -> None:
    os.ftruncate(file, NUM_BYTES)
    with mmap.mmap(file, NUM_BYTES) as memory:
        assert not pages.spread(memory, [1000])


def test_what_is_reserved_on_several_nodes_is_spread_over_them(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = pages.memory_nodes()
    os.ftruncate(file, NUM_BYTES)
    with mmap.mmap(file, NUM_BYTES) as memory:
        spread_or_skip(memory, nodes)
    with open(os.memfd_create("spread"), "r+b") as other:
        # a machine with one node has it twice
        monkeypatch.setattr(pages, "memory_nodes", lambda: [*nodes, *nodes])
        pages.reserve(other.fileno(), NUM_BYTES, SHM)
        with mmap.mmap(other.fileno(), NUM_BYTES) as memory:
            assert policy(memory) == INTERLEAVE


def test_all_memory_is_there_once_it_is_reserved(file: int) -> None:
    pages.reserve(file, NUM_BYTES, SHM)
    found = os.fstat(file)
    assert found.st_size == NUM_BYTES and found.st_blocks * 512 >= NUM_BYTES


def test_what_is_more_than_there_is_takes_nothing() -> None:
    path = SHM / f"pages-{os.getpid()}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with pytest.raises(OSError, match="No space left") as raised:
            pages.reserve(file, 1 << 50, SHM)
        assert raised.value.errno == errno.ENOSPC and os.fstat(file).st_blocks == 0
    finally:
        os.close(file)
        path.unlink()


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("0\n", [0]), ("0-3\n", [0, 1, 2, 3]), ("0-1,4\n", [0, 1, 4]), ("\n", []), ("many", [])],
)
def test_nodes_are_listed_as_linux_does(tmp_path: Path, text: str, nodes: list[int]) -> None:
    listing = tmp_path / "has_memory"
    assert pages.memory_nodes(listing) == []
    listing.write_text(text)
    assert pages.memory_nodes(listing) == nodes


@pytest.mark.parametrize(
    ("options", "is_asked"),
    [
        ("rw,relatime,huge=advise", True),
        ("rw,huge=always", False),
        ("rw,relatime,size=24684084k", False),
    ],
)
def test_huge_pages_are_asked_for_where_the_file_system_waits_for_that(
    tmp_path: Path, options: str, is_asked: bool
) -> None:
    mounts = tmp_path / "mounts"
    assert not pages.is_asked_for_huge_pages(SHM, mounts)
    mounts.write_text(f"proc /proc proc rw 0 0\ntmpfs /dev/shm tmpfs {options} 0 0\n")
    assert pages.is_asked_for_huge_pages(SHM, mounts) is is_asked
    assert not pages.is_asked_for_huge_pages(tmp_path, mounts)


@pytest.fixture
def huge(tmp_path: Path) -> Iterator[Path]:
    """A file system of huge pages for those who ask."""
    mount = ["mount", "-t", "tmpfs", "-o", "huge=advise,size=64m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this system lets nobody mount such a file system here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_memory_is_of_huge_pages_where_those_are_given(huge: Path) -> None:
    with (huge / "segment").open("w+b") as file:
        pages.reserve(file.fileno(), NUM_BYTES, huge)
        found = huge_bytes(file)
    with (huge / "other").open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, NUM_BYTES)
        assert not huge_bytes(file)
    with (huge / "asked").open("w+b") as file:
        file.truncate(NUM_BYTES)
        with mmap.mmap(file.fileno(), NUM_BYTES) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory[:: mmap.PAGESIZE] = bytes(NUM_BYTES // mmap.PAGESIZE)
        if not huge_bytes(file):
            pytest.skip("this system has no huge pages to give")
    assert found


def huge_bytes(file: BufferedRandom) -> int:
    """How much of a file's memory is huge pages."""
    with mmap.mmap(file.fileno(), NUM_BYTES) as memory:
        memory.madvise(MADV_POPULATE_READ)
        text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"{re.escape(file.name)}\n(?:.*\n)*?ShmemPmdMapped: +(\d+) kB", text)
    assert found, "it is not mapped"
    return int(found[1]) << 10
