"""The processes of an island, as its router sees them (router/fence.py)."""

from __future__ import annotations

from alignedserve.sim.process import SimProcess
from alignedserve.sim.world import World


class SimProcesses:
    """The part of a `RouterHost` that answers for processes."""

    def __init__(self, world: World) -> None:
        self._world = world

    def is_user(self, pid: int, segment: str) -> bool:
        return pid in self.users_of(segment)

    def users_of(self, segment: str) -> list[int]:
        return [process.pid for process in self._users(segment)]

    def kill_user(self, pid: int, segment: str) -> bool:
        for process in self._users(segment):
            if process.pid == pid:
                process.kill()
                self._world.fenced(process)
                return True
        return False

    def _users(self, segment: str) -> list[SimProcess]:
        processes = self._world.processes.values()
        return [each for each in processes if segment and each.is_up and each.maps(segment)]
