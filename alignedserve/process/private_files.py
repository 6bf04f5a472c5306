"""Files that other users of the machine can neither read nor prepare, whatever the umask is."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_OTHERS_WRITE = "other users of this machine can write in it; give a directory in it, or take that right away"
# seconds that a lock of another program is waited for, and between two attempts
_MAX_WAIT_S, _POLL_S = 1.0, 0.02


def make_directory(path: str | Path) -> None:
    """Makes a directory for this user only, if it does not exist. Raises OSError if that is impossible, or if others
    can write to an existing one: they could create a file under the next name."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    if os.stat(path).st_mode & stat.S_IWOTH:
        raise OSError(errno.EACCES, _OTHERS_WRITE, str(path))


@contextmanager
def kept(directory: str | Path) -> Iterator[None]:
    """Keeps systemd-tmpfiles from removing what is old in the directory while the block runs. It skips locked
    directories, and locks one itself while it looks into it. Where the directory can't be locked, it is as it would be
    without."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    deadline_s = time.monotonic() + _MAX_WAIT_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(_POLL_S)


def can_others_write(directory: Path) -> bool:
    """Returns whether other users can reach the directory and write to it."""
    modes = [each.stat().st_mode for each in (directory, *directory.resolve().parents)]
    return bool(modes[0] & stat.S_IWOTH) and all(mode & stat.S_IXOTH for mode in modes)


def create(path: Path) -> BinaryIO:
    """Creates a file for unbuffered writing that only this user can read. Raises FileExistsError."""
    return open(path, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600))


def open_log(name: str, flags: int) -> int:
    """An opener for `open`. Only this user can read the files that it creates."""
    return os.open(name, flags, 0o600)
