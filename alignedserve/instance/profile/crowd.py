"""Whether others use the processor: then nothing that is measured says much."""

from __future__ import annotations

import time
from pathlib import Path

# Linux: nanoseconds on a core, nanoseconds ready to run but without one, time slices
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Crowd:
    """Of this thread, since it was made."""

    def __init__(self) -> None:
        self._begun_s, self._waited_s = time.perf_counter(), _waited_s()

    @property
    def waited_share(self) -> float:
        """Of the time, how much it waited for a core. 0 where the system does not say."""
        return (_waited_s() - self._waited_s) / max(time.perf_counter() - self._begun_s, 1e-9)


def _waited_s() -> float:
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
