"""Chooses the pages of the pool's memory. They are spread over the memory of all processors, because all GPUs of the
host copy to and from it. They are huge if the file system grants huge pages on request.

Both are optional: if the system refuses, default pages are used.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)

_NODES = Path("/sys/devices/system/node/has_memory")
_MOUNTS = Path("/proc/self/mounts")
# System call numbers on Linux, by kind of machine.
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_INTERLEAVE = 3
_MADV_POPULATE_WRITE = 23
# The most nodes that Linux supports.
_MAX_NODES = 1024


def reserve(file: int, num_bytes: int, directory: Path) -> None:
    """Extends the file in that directory to `num_bytes` bytes, and allocates all of its memory. Raises OSError if there
    is too little."""
    there = os.fstatvfs(file)
    # A file system without a limit reports 0.
    if there.f_blocks and num_bytes > there.f_bavail * there.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(file, num_bytes)
    with mmap.mmap(file, num_bytes) as memory:
        if len(nodes := memory_nodes()) > 1:
            spread(memory, nodes)
        if is_asked_for_huge_pages(directory):
            _take_huge_pages(memory)
    os.posix_fallocate(file, 0, num_bytes)


def memory_nodes(listing: Path = _NODES) -> list[int]:
    """Returns the NUMA nodes with memory; empty if the system does not report them."""
    try:
        return [*_parsed(listing.read_text())]
    except (OSError, ValueError):
        return []


def _parsed(text: str) -> Iterator[int]:
    """Parses lists such as 0-1,3."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def spread(memory: mmap.mmap, nodes: Sequence[int]) -> bool:
    """Has the file's pages allocated from these nodes in turn, whichever process touches them first. Returns whether
    the system accepted that."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    words = np.zeros(_MAX_NODES // 64, dtype=np.uint64)
    for node in nodes:
        words[node // 64] |= np.uint64(1 << node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    view = np.frombuffer(memory, np.uint8)
    arguments = (view.ctypes.data, view.nbytes, _MPOL_INTERLEAVE, words.ctypes.data, _MAX_NODES + 1, 0)
    if libc.syscall(number, *(ctypes.c_ulong(each) for each in arguments)):
        log.warning("the pool's memory is not spread over %s: %s", nodes, os.strerror(ctypes.get_errno()))
        return False
    return True


def is_asked_for_huge_pages(directory: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether this directory is the mount point of a file system that grants huge pages on request. There is nothing to
    request if it always or never uses them."""
    try:
        fields = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return False
    options = [each[3].split(",") for each in fields if each[1:2] == [str(directory)]]
    return bool(options) and "huge=advise" in options[-1]


def _take_huge_pages(memory: mmap.mmap) -> None:
    """Requests huge pages. A page is only huge if it is first touched through memory with this request."""
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        log.warning("the pool's memory has no huge pages: %s", error.strerror)
