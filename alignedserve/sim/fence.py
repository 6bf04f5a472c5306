"""The processes that could still write to the pool's blocks: see router/fence.py. In place of a process id, an epoch
names one life of a process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from alignedserve.protocol.messages import Hello
from alignedserve.sim.process import SimProcess
from alignedserve.types import Epoch, InstanceId

if TYPE_CHECKING:
    from alignedserve.sim.world import World


class SimFence:
    def __init__(self, world: World) -> None:
        self._world = world
        # The segment of the last pool that connected.
        self.segment = ""
        # Lives that are not connected and could write, with the second at which they were found.
        self._found: dict[tuple[InstanceId, Epoch], float] = {}

    def connected(self, hello: Hello) -> None:
        self._found.pop((hello.instance_id, hello.epoch), None)

    def could_write(self, hello: Hello) -> bool:
        """Returns whether a process that is no longer connected lives and has the segment mapped."""
        process = self._world.processes[hello.instance_id]
        return process.epoch == hello.epoch and self._uses(process, self.segment)

    def strangers(self, segment: str, connected: Iterable[Hello]) -> list[SimProcess]:
        """Returns the instances that have the segment mapped and are not connected."""
        known = {(hello.instance_id, hello.epoch) for hello in connected}
        return [
            process
            for process in self._world.processes.values()
            if self._uses(process, segment) and (process.instance_id, process.epoch) not in known
        ]

    def kill_after(self, patience_s: float, processes: Iterable[SimProcess]) -> None:
        """Kills those of them that were first passed `patience_s` ago."""
        now = self._world.clock.now
        for process in list(processes):
            if now - self._found.setdefault((process.instance_id, process.epoch), now) >= patience_s:
                self.kill(process)

    def kill_silent(self, hello: Hello) -> None:
        process = self._world.processes[hello.instance_id]
        is_it = process.is_up and process.epoch == hello.epoch
        if self.segment and is_it and process.maps(self.segment):
            self.kill(process)

    def kill(self, process: SimProcess) -> None:
        process.kill()
        self._world.fenced(process)

    @staticmethod
    def _uses(process: SimProcess, segment: str) -> bool:
        return bool(segment) and process.is_up and process.role != "kvpool" and process.maps(segment)
