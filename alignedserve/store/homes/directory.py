"""A directory as a home for content. Several hosts may share it.

While content is being written, its name ends in PART. Calls run in threads, because a network disk may hang.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import ParamSpec, TypeVar

from alignedserve.process.private_files import make_directory
from alignedserve.protocol.rate_limited_log import RateLimitedLog
from alignedserve.store.homes.base import BrokenOff, Home, Listed, StoreAway, Writer

PART = ".part"
NUM_THREADS = 8
# Timeout of a call, in seconds.
TIMEOUT_S = 30.0
# Names that are listed at a time.
_NUM_LISTED = 1000

Args = ParamSpec("Args")
Result = TypeVar("Result")


class Threads:
    """A pool of threads for calls of the file system. A thread starts when it is first needed."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(NUM_THREADS, "files")
        # Clients only learn that files are unavailable. The log has the reason.
        self._log = RateLimitedLog(logging.getLogger(__name__))

    async def run(self, call: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        """Runs the call. Any error of the file system becomes StoreAway, except FileNotFoundError."""
        running = asyncio.get_running_loop().run_in_executor(self._executor, lambda: call(*args, **kwargs))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await running
        except FileNotFoundError:
            raise
        except TimeoutError:
            raise StoreAway("the directory of files does not respond") from None
        except OSError as error:
            self._log.warning(f"the directory of files can't be used: {error.strerror}")
            raise StoreAway(f"the directory of files: {error.strerror}") from None


class Directory(Home):
    def __init__(self, path: Path) -> None:
        """Makes the directory if it does not exist. Raises ValueError if it can't be used."""
        try:
            make_directory(path)
        except OSError as error:
            raise ValueError(f"'{path}': {error.strerror}") from None
        self._path = path
        self._threads = Threads()

    @property
    def num_bytes(self) -> int | None:
        return shutil.disk_usage(self._path).total

    def writer(self, name: str) -> Writer:
        return _DirectoryWriter(self._threads, self._path / name)

    async def read(self, name: str, start: int, num_bytes: int) -> bytes | None:
        try:
            return await self._threads.run(_read, self._path / name, start, num_bytes)
        except FileNotFoundError:
            return None

    async def delete(self, name: str) -> None:
        await self._threads.run(_delete, self._path / name)

    async def listed(self, folder: str) -> AsyncIterator[Sequence[Listed]]:
        found = await self._threads.run(lambda: list(_listed(self._path / folder)))
        for start in range(0, len(found), _NUM_LISTED):
            yield found[start : start + _NUM_LISTED]


class _DirectoryWriter(Writer):
    def __init__(self, threads: Threads, path: Path) -> None:
        self._threads = threads
        self._path = path
        self._part = part_of(path)
        self._file: int | None = None
        self._is_over = False
        # A hanging call may still run when the next one starts.
        self._lock = Lock()

    async def write(self, data: bytes) -> None:
        await self._run(self._add, data)

    async def finish(self) -> None:
        await self._run(self._finish)

    async def abort(self) -> None:
        try:
            await self._threads.run(self._abort)
        except (StoreAway, FileNotFoundError):
            return

    async def _run(self, call: Callable[Args, None], *args: Args.args, **kwargs: Args.kwargs) -> None:
        try:
            await self._threads.run(call, *args, **kwargs)
        except (StoreAway, FileNotFoundError) as error:
            raise BrokenOff(str(error)) from None

    def _add(self, data: bytes) -> None:
        with self._lock:
            if self._file is None:
                self._file = self._opened()
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]

    def _opened(self) -> int:
        if self._is_over:
            raise OSError(errno.EBADF, "this file was given up")
        if not self._path.parent.is_dir():
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            _sync_directory(self._path.parent.parent)
        return os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _finish(self) -> None:
        with self._lock:
            if self._file is None:
                raise OSError(errno.EBADF, "this file was given up")
            os.fsync(self._file)
            self._close()
            self._part.rename(self._path)
            _sync_directory(self._path.parent)

    def _abort(self) -> None:
        with self._lock:
            self._close()
            self._part.unlink(missing_ok=True)

    def _close(self) -> None:
        self._is_over = True
        if self._file is not None:
            os.close(self._file)
            self._file = None


def part_of(path: Path) -> Path:
    return path.with_name(path.name + PART)


def _read(path: Path, start: int, num_bytes: int) -> bytes | None:
    try:
        with path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), num_bytes, start)
    except FileNotFoundError:
        if not path.parent.is_dir():
            # An unmounted disk has not lost any files.
            raise OSError(errno.ENODEV, "its folder is not there") from None
        raise
    return data if len(data) == num_bytes else None


def _delete(path: Path) -> None:
    for each in (path, part_of(path)):
        each.unlink(missing_ok=True)


def _listed(folder: Path) -> Iterator[Listed]:
    if not folder.is_dir():
        return
    with os.scandir(folder) as found:
        for entry in found:
            try:
                changed_at = entry.stat(follow_symlinks=False).st_mtime
            except FileNotFoundError:
                continue
            yield Listed(entry.name.removesuffix(PART), changed_at)


def _sync_directory(path: Path) -> None:
    """Makes the names in the directory durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
