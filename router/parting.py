"""Processes that have lost their connection and could still write to the pool's blocks: see `fence.py`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable

from alignedserve.protocol.messages import Hello
from alignedserve.router.fence import is_user, kill_user, users_of
from alignedserve.types import InstanceId

logger = logging.getLogger(__name__)


class Parting:
    def __init__(self, patience_s: float, clock: Callable[[], float] | None = None) -> None:
        """`patience_s`: seconds after which a process that neither exits nor reconnects is killed."""
        self._patience_s = patience_s
        self._clock = clock or time.monotonic
        # The segment of the last pool that connected.
        self.segment = ""
        # Processes with a lost connection that the core has not been notified of.
        self._parting: dict[InstanceId, Hello] = {}
        # When each process was found, in seconds.
        self._found_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._parting)

    def add(self, hello: Hello) -> bool:
        """Returns whether this disconnected process could still write. If so, keeps it here."""
        if hello.role not in ("prefill", "decode", "colocated") or not is_user(hello.pid, self.segment):
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
        gone = [hello for hello in self._parting.values() if not is_user(hello.pid, self.segment)]
        for hello in gone:
            self.back(hello)
        return gone

    def puts_off(self, pool: Hello, connected: Collection[int]) -> bool:
        """Returns whether a pool has connected too early: some process could write to its blocks and is not connected.
        `connected` are process ids."""
        strangers = [pid for pid in users_of(pool.segment) if pid != pool.pid and pid not in connected]
        self._kill_late(strangers, pool.segment)
        return bool(strangers)

    def _kill_late(self, pids: Iterable[int], segment: str) -> None:
        now = self._clock()
        for pid in pids:
            is_late = now - self._found_s.setdefault(pid, now) >= self._patience_s
            if is_late and kill_user(pid, segment):
                logger.warning("Killed process %d, which did not reconnect", pid)
