"""The destination of the event logs of a run's routers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from alignedserve.types import Epoch

# Opens the file of a router's event log. All routers of a run have different epochs.
OpenLog = Callable[[Epoch], BinaryIO]


class HashingFile:
    """A file that keeps only a hash of its content."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._sha.update(data)
        return len(data)

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


def open_in(directory: Path, name: str) -> OpenLog:
    """Returns a function that opens a file in the directory for each router's log."""

    def open_log(epoch: Epoch) -> BinaryIO:
        return (directory / f"{name}-router-{epoch}.events").open("wb", buffering=0)

    return open_log
