"""The pool's memory: a file in shared memory, made by one process and mapped by all processes of the island.

    0        magic, version, length of the description; the description: JSON of block format and number of blocks
    4096     owner table, int64 [OwnerTable.NUM_COLUMNS, num_blocks]
    then     checksums of blocks, uint64 [num_blocks * num_groups]: see `transport/block_checks.py`
    page     blocks, uint8 [num_blocks, column_bytes]: each consists of those of all layer groups, one after another

All memory is reserved at creation, so that using it can't fail later. The magic is written last: a segment without it
was never finished. The segment outlives its processes. Whatever ends the system unlinks it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alignedserve.kv.format import BlockFormat
from alignedserve.kvpool.owners import OwnerTable
from alignedserve.kvpool.pages import reserve
from alignedserve.types import SHM_PREFIX

DIRECTORY = Path("/dev/shm")
MAGIC = b"ALNDPOOL"
VERSION = 6
# Magic, version, and length of the description.
PREFIX = struct.Struct("<8sII")
TABLE_OFFSET = 4096


class Segment:
    """A mapped segment. Its arrays are views of the file."""

    def __init__(
        self, name: str, form: BlockFormat, num_blocks: int, memory: mmap.mmap, file: FileIO
    ) -> None:
        self.name = name
        # Open with a shared lock while this process uses the segment; `sweep` checks that lock.
        self._file = file
        self.form = form
        self.num_blocks = num_blocks
        columns = np.frombuffer(memory, np.int64, OwnerTable.NUM_COLUMNS * num_blocks, TABLE_OFFSET)
        self.table = OwnerTable(columns.reshape(OwnerTable.NUM_COLUMNS, num_blocks))
        num_checksums, offset = num_blocks * form.num_groups, checksums_offset(num_blocks)
        # Those of the blocks of each layer group. Instances write them, and the pool leaves them alone.
        self.checksums: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, num_checksums, offset)
        offset = blocks_offset(form, num_blocks)
        blocks = np.frombuffer(memory, np.uint8, num_blocks * form.column_bytes, offset)
        self.blocks: NDArray[np.uint8] = blocks.reshape(num_blocks, form.column_bytes)

    @classmethod
    def create(cls, name: str, form: BlockFormat, num_blocks: int) -> Segment:
        """Makes a segment. Raises FileExistsError if the name exists, and ValueError if there is too little memory."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: must be at least 1")
        path = path_of(name)
        file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+")
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            total_bytes = blocks_offset(form, num_blocks) + num_blocks * form.column_bytes
            reserve_memory(file.fileno(), name, total_bytes)
            memory = mmap.mmap(file.fileno(), total_bytes)
            write_header(memory, form, num_blocks)
        except BaseException:
            path.unlink()
            file.close()
            raise
        return cls(name, form, num_blocks, memory, file)

    @classmethod
    def attach(cls, name: str, form: BlockFormat | None = None) -> Segment:
        """Maps a segment. Raises FileNotFoundError if it does not exist, and ValueError if its blocks do not have the
        format `form` (None accepts any) or if other users can access it."""
        file = FileIO(os.open(path_of(name), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "r+")
        try:
            if not is_private(os.fstat(file.fileno())):
                raise ValueError(f"segment {name}: others can access it, or it belongs to another user")
            fcntl.flock(file, fcntl.LOCK_SH)
            return cls._attach(name, form, file)
        except BaseException:
            file.close()
            raise

    @classmethod
    def _attach(cls, name: str, form: BlockFormat | None, file: FileIO) -> Segment:
        memory = map_all(file.fileno(), name)
        described = read_header(memory, name)
        found = BlockFormat(**described["format"])
        for field, value in (form.describe() if form else {}).items():
            if described["describes"][field] != value:
                raise ValueError(
                    f"segment {name}: its blocks have {field}={described['describes'][field]}, "
                    f"and {field}={value} is needed"
                )
        num_blocks = described["num_blocks"]
        if len(memory) != (expected := blocks_offset(found, num_blocks) + num_blocks * found.column_bytes):
            raise ValueError(f"segment {name}: has {len(memory)} bytes, and {expected} are needed")
        return cls(name, found, num_blocks, memory, file)

    def close(self) -> None:
        """Drops the arrays. The memory is unmapped after its last reference. Safe to repeat."""
        self.table = OwnerTable.plain(0)
        self.checksums = np.zeros(0, np.uint64)
        self.blocks = np.zeros((0, self.form.column_bytes), np.uint8)
        self._file.close()

    @staticmethod
    def unlink(name: str) -> None:
        """Removes the name. The memory is freed when the last process unmaps it. Safe to repeat."""
        path_of(name).unlink(missing_ok=True)


@contextmanager
def scratch_blocks(form: BlockFormat, num_blocks: int) -> Iterator[NDArray[np.uint8]]:
    """Yields blocks in memory like a pool's. It takes no room in DIRECTORY from a pool that is being made, and vanishes
    if this process is killed. Raises OSError if there is too little memory."""
    file = os.memfd_create("alignedserve-scratch", os.MFD_CLOEXEC)
    try:
        reserve(file, num_blocks * form.column_bytes, DIRECTORY)
        memory = mmap.mmap(file, num_blocks * form.column_bytes)
    finally:
        os.close(file)
    yield np.frombuffer(memory, np.uint8).reshape(num_blocks, form.column_bytes)


def sweep(min_age_s: float = 60.0) -> list[str]:
    """Removes segments that no process has open, because all processes of their system were killed. Returns their
    names.

    A segment under construction is briefly not open either, so only segments older than `min_age_s` are removed.
    """
    swept = []
    for path in DIRECTORY.glob(f"{SHM_PREFIX}*"):
        if _is_left(path, min_age_s):
            path.unlink(missing_ok=True)
            swept.append(path.name)
    return swept


def is_private(found: os.stat_result) -> bool:
    """Returns whether the file is as `create` makes it. Any user can create a file with its name."""
    is_file, others = stat.S_ISREG(found.st_mode), stat.S_IRWXG | stat.S_IRWXO
    return is_file and found.st_uid == os.geteuid() and not found.st_mode & others


def _is_left(path: Path, min_age_s: float) -> bool:
    try:
        # The file may be anything from any user: without O_NONBLOCK, opening a pipe would wait for its other end.
        with FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not is_private(found):
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return time.time() - found.st_ctime >= min_age_s
    except OSError:
        # The segment is in use, another user's, or gone.
        return False


def path_of(name: str) -> Path:
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"segment name {name!r}: must be a file name, without directories")
    return DIRECTORY / name


def checksums_offset(num_blocks: int) -> int:
    return TABLE_OFFSET + 8 * OwnerTable.NUM_COLUMNS * num_blocks


def blocks_offset(form: BlockFormat, num_blocks: int) -> int:
    checksums_end = checksums_offset(num_blocks) + 8 * form.num_groups * num_blocks
    return -(-checksums_end // mmap.PAGESIZE) * mmap.PAGESIZE


def reserve_memory(file: int, name: str, total_bytes: int) -> None:
    try:
        reserve(file, total_bytes, DIRECTORY)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG):
            raise
        disk = os.statvfs(DIRECTORY)
        raise ValueError(
            f"segment {name}: needs {total_bytes} bytes of shared memory, "
            f"and {disk.f_bavail * disk.f_frsize} are free in {DIRECTORY}"
        ) from None


def write_header(memory: mmap.mmap, form: BlockFormat, num_blocks: int) -> None:
    described = {"format": asdict(form), "describes": form.describe(), "num_blocks": num_blocks}
    text = json.dumps(described).encode()
    memory[PREFIX.size : PREFIX.size + len(text)] = text
    memory[: PREFIX.size] = PREFIX.pack(bytes(8), VERSION, len(text))
    memory[: len(MAGIC)] = MAGIC


def map_all(file: int, name: str) -> mmap.mmap:
    if os.fstat(file).st_size < TABLE_OFFSET:
        raise ValueError(f"segment {name}: not a segment of a KV pool, or one that was never completed")
    return mmap.mmap(file, 0)


def read_header(memory: mmap.mmap, name: str) -> dict[str, Any]:
    magic, version, length = PREFIX.unpack_from(memory)
    if magic != MAGIC:
        raise ValueError(f"segment {name}: not a segment of a KV pool, or one that was never completed")
    if version != VERSION:
        raise ValueError(f"segment {name}: has version {version}, and {VERSION} is needed")
    described: dict[str, Any] = json.loads(memory[PREFIX.size : PREFIX.size + length])
    return described
