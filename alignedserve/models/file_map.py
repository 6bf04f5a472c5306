"""The map of a file of tensors, and a tensor's place in it. Needs no torch."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    # First byte and end, counted from the start of the file.
    begin: int
    end: int


def map_file(path: Path, least_bytes: int) -> mmap.mmap:
    """Raises ValueError if the file can't be read, or is shorter than `least_bytes`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < least_bytes:
                raise ValueError(f"{path} is truncated: {size} bytes; must have at least {least_bytes}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror}") from error
