"""Makes sure that no process which the router has lost writes into pool blocks that are others' by then.

To close a connection is not enough: a process that hangs, or has not noticed, would go on with the copy that it is in.
So the router goes on without a process only when that can't write any more: it has ended, or it has said Hello again,
which it does when it has dropped everything (`instance/process.py`). One that does neither for long is killed. That a
process has the pool's memory mapped proves that it is one of the island's.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from alignedserve.kvpool.segment import path_of


def is_user(pid: int, segment: str) -> bool:
    """Returns whether another process than this one lives and has the segment mapped."""
    if not segment or pid == os.getpid():
        return False
    try:
        return str(path_of(segment)) in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def users_of(segment: str) -> list[int]:
    """Returns the ids of all processes but this one that have the segment mapped."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if is_user(pid, segment)]


def kill_user(pid: int, segment: str) -> bool:
    """Kills the process if it has the segment mapped. Returns whether it did."""
    if not is_user(pid, segment):
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True
