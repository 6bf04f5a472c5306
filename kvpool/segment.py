"""The pool's memory: a file in shared memory, made by one process, mapped by all of the island.

    0        magic, version, length of the description; the description: JSON of block format and number of blocks
    4096     owner table, int64 [OwnerTable.NUM_COLUMNS, num_blocks]
    page     blocks, uint8 [num_blocks, column_bytes]: each has those of all groups of layers, one after another

All memory is reserved when it is made, so that using it cannot fail later. The magic is written last: a segment without
it was never finished. It outlives the processes; what ends the system unlinks it.
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

from alignedserve.kvpool.owners import OwnerTable
from alignedserve.kvpool.pages import reserve
from alignedserve.protocol.kv_format import BlockFormat

DIRECTORY = Path("/dev/shm")
# The names of all segments begin with this.
NAME_PREFIX = "alignedserve-"
MAGIC = b"ALNDPOOL"
VERSION = 3
# The magic, the version, and the length of the description.
PREFIX = struct.Struct("<8sII")
TABLE_OFFSET = 4096


class Segment:
    """A mapped segment. Its arrays are views of the file."""

    def __init__(
        self, name: str, form: BlockFormat, num_blocks: int, memory: mmap.mmap, file: FileIO
    ) -> None:
        self.name = name
        # The file is open with a shared lock as long as this process uses the segment; `sweep` looks for that.
        self._file = file
        self.form = form
        self.num_blocks = num_blocks
        columns = np.frombuffer(memory, np.int64, OwnerTable.NUM_COLUMNS * num_blocks, TABLE_OFFSET)
        self.table = OwnerTable(columns.reshape(OwnerTable.NUM_COLUMNS, num_blocks))
        blocks = np.frombuffer(memory, np.uint8, num_blocks * form.column_bytes, blocks_offset(num_blocks))
        self.blocks: NDArray[np.uint8] = blocks.reshape(num_blocks, form.column_bytes)

    @classmethod
    def create(cls, name: str, form: BlockFormat, num_blocks: int) -> Segment:
        """Makes a segment. Raises FileExistsError if there is one of that name, and ValueError if there is too little
        memory."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: must be at least 1")
        path = path_of(name)
        file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+")
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            total_bytes = blocks_offset(num_blocks) + num_blocks * form.column_bytes
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
        """Maps a segment. Raises FileNotFoundError if there is none, and ValueError if its blocks do not have the
        format `form` (None: any is fine) or if other users can get at it."""
        file = FileIO(os.open(path_of(name), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "r+")
        try:
            if not is_private(os.fstat(file.fileno())):
                raise ValueError(f"segment {name}: others can get at it, or it is another user's")
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
        if len(memory) != (expected := blocks_offset(num_blocks) + num_blocks * found.column_bytes):
            raise ValueError(f"segment {name}: has {len(memory)} bytes, and {expected} are needed")
        return cls(name, found, num_blocks, memory, file)

    def close(self) -> None:
        """Lets go of the arrays; the memory is unmapped when nobody refers to them any more. Safe to repeat."""
        self.table = OwnerTable.plain(0)
        self.blocks = np.zeros((0, self.form.column_bytes), np.uint8)
        self._file.close()

    @staticmethod
    def unlink(name: str) -> None:
        """Removes the name; the memory goes with the last process that has it mapped. Safe to repeat."""
        path_of(name).unlink(missing_ok=True)


@contextmanager
def scratch_blocks(form: BlockFormat, num_blocks: int) -> Iterator[NDArray[np.uint8]]:
    """Yields blocks in memory of the kind that a pool has. It takes no room in DIRECTORY from a pool that is made
    meanwhile, and nothing is left of it if this process is killed. Raises OSError if there is too little memory."""
    file = os.memfd_create("alignedserve-scratch", os.MFD_CLOEXEC)
    try:
        reserve(file, num_blocks * form.column_bytes, DIRECTORY)
        memory = mmap.mmap(file, num_blocks * form.column_bytes)
    finally:
        os.close(file)
    yield np.frombuffer(memory, np.uint8).reshape(num_blocks, form.column_bytes)


def sweep(min_age_s: float = 60.0) -> list[str]:
    """Removes segments which no process has open, since all processes of their system were killed. Returns their
    names.

    A segment that is being made is not open for a moment either, so only segments older than `min_age_s` are removed.
    """
    swept = []
    for path in DIRECTORY.glob(f"{NAME_PREFIX}*"):
        if _is_left(path, min_age_s):
            path.unlink(missing_ok=True)
            swept.append(path.name)
    return swept


def is_private(found: os.stat_result) -> bool:
    """Returns whether it is a file as `create` makes them: any user can put a file of this name there."""
    is_file, others = stat.S_ISREG(found.st_mode), stat.S_IRWXG | stat.S_IRWXO
    return is_file and found.st_uid == os.geteuid() and not found.st_mode & others


def _is_left(path: Path, min_age_s: float) -> bool:
    try:
        # Any user can put anything there: without O_NONBLOCK, opening a pipe would wait for its other end.
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


def blocks_offset(num_blocks: int) -> int:
    table_end = TABLE_OFFSET + 8 * OwnerTable.NUM_COLUMNS * num_blocks
    return -(-table_end // mmap.PAGESIZE) * mmap.PAGESIZE


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
        raise ValueError(f"segment {name}: no segment of a KV pool, or one that was never finished")
    return mmap.mmap(file, 0)


def read_header(memory: mmap.mmap, name: str) -> dict[str, Any]:
    magic, version, length = PREFIX.unpack_from(memory)
    if magic != MAGIC:
        raise ValueError(f"segment {name}: no segment of a KV pool, or one that was never finished")
    if version != VERSION:
        raise ValueError(f"segment {name}: has version {version}, and {VERSION} is needed")
    described: dict[str, Any] = json.loads(memory[PREFIX.size : PREFIX.size + length])
    return described
