"""Ensures that no process lost by the router writes to pool blocks that belong to other requests by then.

Closing the connection is not enough: a process that hangs, or has not noticed, would continue its current copy. So the
router continues without a process only when that process can't write any more. Either it has ended, or it has sent
Hello again, which it does after dropping everything (`instance/process/`). A process that does neither for long is
killed. Only a process that has the pool's memory mapped is killed, because such a process is one of the island's.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Protocol

from alignedserve.kvpool.segment import path_of
from alignedserve.protocol.host import Host, LiveHost
from alignedserve.protocol.messages import Hello
from alignedserve.types import InstanceId

logger = logging.getLogger(__name__)


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


class DisconnectedWriters:
    """Processes that have lost their connection and could still write to the pool's blocks."""

    def __init__(self, patience_s: float, host: RouterHost) -> None:
        """`patience_s`: seconds after which a process that neither exits nor reconnects is killed."""
        self._patience_s = patience_s
        self._host = host
        # The segment of the last pool that connected.
        self.segment = ""
        # Processes with a lost connection that the core has not been notified of.
        self._parting: dict[InstanceId, Hello] = {}
        # When each process was found, in seconds.
        self._found_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._parting)

    def __contains__(self, name: InstanceId) -> bool:
        return name in self._parting

    def add(self, hello: Hello) -> bool:
        """Returns whether this disconnected process could still write. If so, keeps it here."""
        if hello.role not in ("prefill", "decode", "colocated") or not self._could_write(hello):
            return False
        self._parting[hello.instance_id] = hello
        self._kill_late([hello.pid], self.segment)
        return True

    def back(self, hello: Hello) -> Hello | None:
        """Handles a process that has sent Hello. Returns the Hello of its earlier connection, or of its earlier start,
        if it was kept here."""
        self._found_s.pop(hello.pid, None)
        return self._parting.pop(hello.instance_id, None)

    def take_gone(self) -> list[Hello]:
        """Returns the processes that can't write any more, and kills those that do not return in time."""
        self._kill_late([hello.pid for hello in self._parting.values()], self.segment)
        gone = [hello for hello in self._parting.values() if not self._could_write(hello)]
        for hello in gone:
            self.back(hello)
        return gone

    def puts_off(self, pool: Hello, connected: Collection[int]) -> bool:
        """Returns whether a pool has connected too early: some process could write to its blocks and is not connected.
        `connected` are process ids."""
        try:
            users = self._host.users_of(pool.segment)
        except OSError as error:
            logger.warning("The pool waits, because the processes of this host can't be listed: %s", error)
            return True
        strangers = [pid for pid in users if pid != pool.pid and pid not in connected]
        self._kill_late(strangers, pool.segment)
        return bool(strangers)

    def _could_write(self, hello: Hello) -> bool:
        return self._host.is_user(hello.pid, self.segment)

    def _kill_late(self, pids: Iterable[int], segment: str) -> None:
        now = self._host.now()
        for pid in pids:
            is_late = now - self._found_s.setdefault(pid, now) >= self._patience_s
            if is_late and self._host.kill_user(pid, segment):
                logger.warning("Killed process %d, which did not reconnect", pid)
