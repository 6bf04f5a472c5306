"""Ensures that no process lost by the router writes to pool blocks that belong to other requests by then.

Closing the connection is not enough: a process that hangs, or has not noticed, would continue its current copy. So the
router continues without a process only when that process can't write any more. Either it has ended, or it has sent
Hello again, which it does after dropping everything (`instance/process.py`). A process that does neither for long is
killed. Only a process that has the pool's memory mapped is killed, because such a process is one of the island's.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from alignedserve.kvpool.segment import path_of


def is_user(pid: int, segment: str) -> bool:
    """Returns whether another process lives and has the segment mapped."""
    if not segment or pid == os.getpid():
        return False
    try:
        return str(path_of(segment)) in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def users_of(segment: str) -> list[int]:
    """Returns the ids of all other processes that have the segment mapped."""
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
