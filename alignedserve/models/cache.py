"""The directory for what was downloaded or computed once."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

# The beginning of names of what is being made. What is older is left from killed processes.
MAKING, LEFT_S = "making-", 86400.0


def in_cache(kind: str) -> Path:
    """Returns the directory of a kind of files. Raises ValueError."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise ValueError(
            "there is no home directory for the cache; XDG_CACHE_HOME names another place"
        ) from error
    return Path(base) / "alignedserve" / kind


def remove_left(directory: Path) -> None:
    """Removes what killed processes left there, a day later."""
    for path in directory.glob(f"{MAKING}*"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - LEFT_S:
                shutil.rmtree(path, ignore_errors=True)
