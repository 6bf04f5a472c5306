"""Detects other processes on the processor, which make measured times unreliable."""

from __future__ import annotations

import time
from pathlib import Path

# Linux reports nanoseconds on a core, nanoseconds of waiting for a core, and the number of time slices.
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Crowd:
    """How crowded the processor has been for this thread since the object was created."""

    def __init__(self) -> None:
        self._begun_s, self._waited_s = time.perf_counter(), _waited_s()

    @property
    def waited_share(self) -> float:
        """Share of the time in which the thread waited for a core; 0 if the system does not report it."""
        return (_waited_s() - self._waited_s) / max(time.perf_counter() - self._begun_s, 1e-9)


def _waited_s() -> float:
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
