"""The files that commands write. A plain file gets all that is written or stays as it was: a new one takes its place.
Anything else, such as a device, a pipe, or an open file of this process (/dev/stdout), is written to as it is.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import click

# The most links of a path that the system follows.
_MAX_LINKS = 40
_PROC = Path("/proc")


class OutputFile(click.Path):
    """A path which is checked at once, and not only when all has been computed."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        try:
            with suppress(FileNotFoundError):
                path.lstat()
            folder = path.resolve().parent
            if is_replaced(path) and not (folder.is_dir() and os.access(folder, os.W_OK)):
                self.fail(f"'{folder}' is no directory that can be written to.", param, ctx)
        except (OSError, RuntimeError) as error:
            # (Links that lead round in circles are a RuntimeError.)
            self.fail(f"{path}: {getattr(error, 'strerror', error)}", param, ctx)
        return path


def is_replaced(path: Path) -> bool:
    """Returns whether a new file takes the place of what is there, or of nothing; False if that is written to."""
    return (os.path.isfile(path) or not os.path.exists(path)) and not _proc_link(path)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write. If `path` is replaced, it is what was written if the block ends without an error, and
    otherwise what it was. Raises OSError."""
    if not is_replaced(path):
        with _written_to(path) as file:
            yield file
        return
    # A link stays, and leads to what is new.
    place = path.resolve()
    # A name as long as may be has no room for more.
    part = place.with_name(f".alignedserve.{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:
            if place.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(place.stat().st_mode))
            yield file
        part.replace(place)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _written_to(path: Path) -> BinaryIO:
    link = _proc_link(path)
    if link is None or link.parent != _PROC / str(os.getpid()) / "fd":
        return path.open("wb")
    # It goes on where its last writer stopped: opening it again would begin at its start.
    sys.stdout.flush()
    return os.fdopen(os.dup(int(link.name)), "wb")


def _proc_link(path: Path) -> Path | None:
    """Returns the link below /proc through which the path leads: it names a file that a process has open, which may
    have no other name."""
    for _ in range(_MAX_LINKS):
        path = path.parent.resolve() / path.name
        if not os.path.islink(path):
            return None
        if path.is_relative_to(_PROC):
            return path
        path = path.parent / path.readlink()
    return None
