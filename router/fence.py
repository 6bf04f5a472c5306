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
from typing import Protocol

from alignedserve.kvpool.segment import path_of
from alignedserve.protocol.host import Host, LiveHost


class RouterHost(Host, Protocol):
    """The host of a router. It answers for the processes there, by their ids."""

    def is_user(self, pid: int, segment: str) -> bool:
        """Returns whether another process lives and has the segment mapped, or may have."""

    def users_of(self, segment: str) -> list[int]:
        """Returns the ids of all other processes that have the segment mapped, or may have. Raises OSError if the
        processes can't be listed now."""

    def kill_user(self, pid: int, segment: str) -> bool:
        """Kills the process if it has the segment mapped. Returns whether it did."""


class LiveRouterHost(LiveHost):
    def is_user(self, pid: int, segment: str) -> bool:
        return self._has_mapped(pid, segment) is not False

    def users_of(self, segment: str) -> list[int]:
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in pids if self.is_user(pid, segment)]

    def kill_user(self, pid: int, segment: str) -> bool:
        if not self._has_mapped(pid, segment):
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    @staticmethod
    def _has_mapped(pid: int, segment: str) -> bool | None:
        """Returns None if it is not known now: this process, or the machine, may have no free file or memory."""
        if not segment or pid == os.getpid():
            return False
        try:
            # The kernel writes names of files as they are, in any encoding.
            return os.fsencode(path_of(segment)) in Path(f"/proc/{pid}/maps").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False
        except OSError:
            return None
