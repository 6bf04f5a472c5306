"""The pool's memory is spread over nodes, and all there before anybody uses it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from alignedserve.kvpool import pages

NUM_BYTES = 8 << 20
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
OF_ADDRESS, INTERLEAVE = 2, 3


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


def test_pages_of_the_file_come_from_all_nodes_in_turn_whoever_maps_it(file: int) -> None:
    os.ftruncate(file, NUM_BYTES)
    nodes = pages.memory_nodes()
    with mmap.mmap(file, NUM_BYTES) as memory:
        if not nodes or not pages.spread(memory, nodes):
            pytest.skip("this system lets nobody say where memory is")
        assert policy(memory) == INTERLEAVE
    with mmap.mmap(file, NUM_BYTES) as again:
        assert policy(again) == INTERLEAVE


def test_a_node_that_is_not_there_changes_nothing(file: int) -> None:
    os.ftruncate(file, NUM_BYTES)
    with mmap.mmap(file, NUM_BYTES) as memory:
        assert not pages.spread(memory, [1000])


def test_all_memory_is_there_once_it_is_reserved(file: int) -> None:
    pages.reserve(file, NUM_BYTES)
    found = os.fstat(file)
    assert found.st_size == NUM_BYTES and found.st_blocks * 512 >= NUM_BYTES


def test_what_is_more_than_there_is_takes_nothing() -> None:
    path = Path("/dev/shm") / f"pages-{os.getpid()}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with pytest.raises(OSError, match="No space left") as raised:
            pages.reserve(file, 1 << 50)
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
