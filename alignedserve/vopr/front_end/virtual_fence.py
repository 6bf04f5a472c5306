"""Which simulated processes could still write to a pool's blocks. Answers what routers ask their host
(router/fence.py).

A process id is one life of one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

from alignedserve.router import parting, server
from alignedserve.sim.process import SimProcess
from alignedserve.sim.world import World
from alignedserve.types import Epoch
from alignedserve.vopr.front_end.virtual_process import VirtualProcess, current_process

# The first process id of islands' processes.
_FIRST_PID = 1000


class VirtualFence:
    def __init__(self) -> None:
        # Called with each process that a router has killed.
        self.fenced: Callable[[SimProcess], None] = lambda process: None
        self._pids: dict[tuple[SimProcess, Epoch], int] = {}
        self._worlds: dict[VirtualProcess | None, World] = {}

    def router_begins(self, process: VirtualProcess, world: World) -> None:
        self._worlds[process] = world

    def pid_of(self, process: SimProcess) -> int:
        return self._pids.setdefault((process, process.epoch), _FIRST_PID + len(self._pids))

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Lets routers use this fence while the block runs."""
        with (
            mock.patch.object(parting, "is_user", self._is_user),
            mock.patch.object(parting, "users_of", self._users_of),
            mock.patch.object(parting, "kill_user", self._kill_user),
            mock.patch.object(server, "kill_user", self._kill_user),
        ):
            yield

    def _is_user(self, pid: int, segment: str) -> bool:
        return any(self.pid_of(process) == pid for process in self._users(segment))

    def _users_of(self, segment: str) -> list[int]:
        return [self.pid_of(process) for process in self._users(segment)]

    def _kill_user(self, pid: int, segment: str) -> bool:
        for process in self._users(segment):
            if self.pid_of(process) == pid:
                process.kill()
                self.fenced(process)
                return True
        return False

    def _users(self, segment: str) -> list[SimProcess]:
        """Returns the live processes of the island of the current router."""
        processes = self._worlds[current_process()].processes.values()
        return [each for each in processes if segment and each.is_up and each.maps(segment)]
