"""Reads input files where they are, without an upload. Only the prefixes that the operator allows are readable.

A local file is opened so that no symbolic link leads out of its prefix, not even one that is created during the open.
The file must be the same one as when the job was created. The operator decides which buckets exist and with which
credentials they are read (alignedserve/store/homes/bucket.py).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from alignedserve.store import PlacedInput, StoreAway
from alignedserve.store.homes import BucketPlace, DirectoryPlace, parse_place
from alignedserve.store.homes.directory import Threads
from alignedserve.types import InvalidRequest

if TYPE_CHECKING:
    from alignedserve.store.homes.bucket import Objects

# Errors of the file system for a path that is not a readable file.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENXIO)


class InputChanged(Exception):
    """The file is not the same one as when the job was created."""


def is_url(text: str) -> bool:
    return "://" in text


class PlacedInputs:
    def __init__(self, prefixes: Sequence[str], max_bytes: int | None = None) -> None:
        """`max_bytes` is the largest size of a file. Raises ValueError for an invalid prefix."""
        self._prefixes = prefixes
        self._places = [parse_place(each) for each in prefixes]
        self._max_bytes = max_bytes
        self._threads = Threads()
        self._buckets: dict[str, Objects] = {}

    async def find(self, url: str) -> PlacedInput:
        """Returns the file's size and version. Raises InvalidRequest. A URL outside all prefixes is refused without a
        look."""
        num_bytes, version = await self._found(url)
        if self._max_bytes is not None and num_bytes > self._max_bytes:
            raise InvalidRequest(
                f"input_file_id: the file has {num_bytes} bytes, and may have {self._max_bytes}"
            )
        return PlacedInput(url, num_bytes, version)

    async def read(self, placed: PlacedInput, start: int, num_bytes: int) -> bytes:
        """Returns exactly `num_bytes` bytes from `start` on. Raises InputChanged."""
        try:
            place = self._allowed(placed.url)
            if isinstance(place, BucketPlace):
                data, head = await self._bucket(place.bucket).read(place.key, start, num_bytes)
                version = head.e_tag
            else:
                data, version = await self._threads.run(_read, *place, start, num_bytes)
        except (FileNotFoundError, InvalidRequest):
            raise InputChanged(placed.url) from None
        if version != placed.version:
            raise InputChanged(placed.url)
        return data

    async def _found(self, url: str) -> tuple[int, str]:
        place = self._allowed(url)
        try:
            if isinstance(place, BucketPlace):
                head = await self._bucket(place.bucket).head(place.key)
                return head.num_bytes, head.e_tag
            return await self._threads.run(_stat, *place)
        except FileNotFoundError:
            raise InvalidRequest(
                f"input_file_id={url!r}: there is no such file, or none that can be read"
            ) from None

    def _allowed(self, url: str) -> BucketPlace | tuple[Path, Path]:
        """Returns the place of an object; or a file's prefix and path, both with symbolic links resolved. Raises
        InvalidRequest if no prefix contains it."""
        if not is_url(url):
            raise self._refused(url)
        try:
            place = parse_place(url)
        except ValueError as error:
            raise InvalidRequest(f"input_file_id={url!r}: {error}") from None
        for prefix in self._places:
            if isinstance(place, BucketPlace):
                if isinstance(prefix, BucketPlace) and prefix.has(place):
                    return place
            elif isinstance(prefix, DirectoryPlace):
                root, path = (Path(os.path.realpath(each.path)) for each in (prefix, place))
                if path.is_relative_to(root):
                    return root, path
        raise self._refused(url)

    def _refused(self, url: str) -> InvalidRequest:
        allowed = ", ".join(self._prefixes)
        return InvalidRequest(
            f"input_file_id={url!r}: "
            + (f"files are read in place only under {allowed}" if allowed else "this server reads no URLs")
        )

    def _bucket(self, name: str) -> Objects:
        if name not in self._buckets:
            from alignedserve.store.homes.bucket import Objects

            try:
                self._buckets[name] = Objects(name)
            except ValueError as error:
                raise StoreAway(str(error)) from None
        return self._buckets[name]


def _read(root: Path, path: Path, start: int, num_bytes: int) -> tuple[bytes, str]:
    file = opened(root, path)
    try:
        version = _version(os.fstat(file))
        data = os.pread(file, num_bytes, start)
    finally:
        os.close(file)
    if len(data) != num_bytes:
        raise FileNotFoundError(path)
    return data, version


def _stat(root: Path, path: Path) -> tuple[int, str]:
    file = opened(root, path)
    try:
        found = os.fstat(file)
    finally:
        os.close(file)
    return found.st_size, _version(found)


def opened(root: Path, path: Path) -> int:
    """Opens a regular file, one path component at a time; none may be a symbolic link. Raises FileNotFoundError."""
    *folders, name = path.relative_to(root).parts or (".",)
    plain = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        at = os.open(root, plain | os.O_DIRECTORY)
        try:
            for folder in folders:
                inner = os.open(folder, plain | os.O_DIRECTORY, dir_fd=at)
                os.close(at)
                at = inner
            # Without O_NONBLOCK, opening a named pipe blocks.
            file = os.open(name, plain | os.O_NONBLOCK, dir_fd=at)
        finally:
            os.close(at)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise FileNotFoundError(path) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileNotFoundError(path)
    return file


def _version(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
