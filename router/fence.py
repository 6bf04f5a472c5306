"""Makes sure that a process which hangs does not wake up and write into pool blocks that are others' by then.

To close its connection would not be enough: the process would go on with the copy that it was in. So it is killed,
which closes the connection too. That a process with this id, on this host, has the pool's memory mapped proves that it
is one of the island's.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from alignedserve.kvpool.segment import path_of


def kill_user(pid: int, segment: str) -> bool:
    """Kills the process if it has the segment mapped. Returns whether it did."""
    if not segment:
        return False
    try:
        is_user = str(path_of(segment)) in Path(f"/proc/{pid}/maps").read_text()
        if is_user and pid != os.getpid():
            os.kill(pid, signal.SIGKILL)
            return True
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return False
