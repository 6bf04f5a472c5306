"""Files that commands write.

A plain file is replaced by a new one when the whole content is written, and stays unchanged otherwise. Anything else is
written to directly: a device, a pipe, or an open file of this process (/dev/stdout).
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
import msgspec

# Maximum number of links in a path that the system follows.
_MAX_LINKS = 40
_PROC = Path("/proc")


class OutputFile(click.Path):
    """A path that is checked when the command line is parsed, before any work is done."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        try:
            with suppress(FileNotFoundError):
                path.lstat()
            folder = path.resolve().parent
            if is_replaced(path) and not (folder.is_dir() and os.access(folder, os.W_OK)):
                self.fail(f"'{folder}' is not a directory that can be written to.", param, ctx)
        except (OSError, RuntimeError) as error:
            # A cycle of links raises RuntimeError.
            self.fail(f"{path}: {getattr(error, 'strerror', error)}", param, ctx)
        return path


def is_replaced(path: Path) -> bool:
    """Returns whether a new file takes this path; False if the existing file is written to."""
    return (os.path.isfile(path) or not os.path.exists(path)) and not _proc_link(path)


def write_json(path: Path, found: object) -> None:
    """Writes indented JSON. Numbers that JSON does not have, such as infinity, become null. Raises OSError."""
    with whole_file(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write. Raises OSError.

    A path that is replaced gets the new content if the block ends without an error, and is unchanged otherwise.
    """
    if not is_replaced(path):
        with _written_to(path) as file:
            yield file
        return
    # A link is kept and leads to the new file.
    place = path.resolve()
    # The name does not contain the path's own: that may have the maximum length already.
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
    # Writing continues where the last writer stopped. Opening the file again would begin at its start.
    sys.stdout.flush()
    return os.fdopen(os.dup(int(link.name)), "wb")


def _proc_link(path: Path) -> Path | None:
    """Returns the link below /proc that the path leads through; None without one.

    Such a link names an open file of a process, which may have no other name.
    """
    for _ in range(_MAX_LINKS):
        path = path.parent.resolve() / path.name
        if not os.path.islink(path):
            return None
        if path.is_relative_to(_PROC):
            return path
        path = path.parent / path.readlink()
    return None
