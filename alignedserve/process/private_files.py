"""Files which the machine's other users can't read and can't have prepared, whatever the umask is."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_OTHERS_WRITE = "other users of this machine can write in it; give a directory in it, or take that right away"


def make_directory(path: str | Path) -> None:
    """Makes a directory for this user alone, if it is not there. Raises OSError if that is impossible, or if there is
    one in which others can write: they could put a file there under a name that is used next."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    if os.stat(path).st_mode & stat.S_IWOTH:
        raise OSError(errno.EACCES, _OTHERS_WRITE, str(path))


def can_others_write(directory: Path) -> bool:
    """Returns whether other users may write in the directory and can reach it."""
    modes = [each.stat().st_mode for each in (directory, *directory.resolve().parents)]
    return bool(modes[0] & stat.S_IWOTH) and all(mode & stat.S_IXOTH for mode in modes)


def create(path: Path) -> BinaryIO:
    """Creates a file which is written without a buffer and which only this user can read. Raises FileExistsError."""
    return open(path, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600))


def open_log(name: str, flags: int) -> int:
    """An opener for `open`: what it creates can be read by the user's group too, and by nobody else."""
    return os.open(name, flags, 0o640)
