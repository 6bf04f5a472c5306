"""The router's process in virtual time: the live server, on a simulated host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from alignedserve.router.eventlog import EventLog
from alignedserve.router.events import Observer
from alignedserve.router.router import Router
from alignedserve.router.server import RouterServer
from alignedserve.sim.fence import SimProcesses
from alignedserve.sim.host import SimHost
from alignedserve.sim.network import SimLink
from alignedserve.sim.process import SimProcess
from alignedserve.types import Epoch, InstanceId

if TYPE_CHECKING:
    from alignedserve.sim.world import World


class RouterProcess(SimHost, SimProcesses):
    def __init__(self, world: World, make_core: Callable[[Epoch], Router]) -> None:
        SimHost.__init__(self, world.clock)
        SimProcesses.__init__(self, world)
        self._make_core = make_core
        self.core: Router | None = None
        self.observers: list[Observer] = []
        # Returns the event log of each router; None: there is none.
        self.make_log: Callable[[Epoch], EventLog] | None = None
        self._server: RouterServer
        # Processes that connect when the router is up.
        self._waiting: dict[InstanceId, SimProcess] = {}

    @property
    def is_up(self) -> bool:
        return self.core is not None

    def start(self) -> None:
        if self.core:
            raise RuntimeError("the router is started, but is already up")
        world = self._world
        epoch = world.next_epoch()
        self.core = self._make_core(epoch)
        roles = {name: process.role for name, process in world.processes.items()}
        log = self.make_log(epoch) if self.make_log else None
        self._server = RouterServer(self.core, epoch, "", roles, log, host=self)
        self._server.observers = self.observers
        waiting, self._waiting = self._waiting, {}
        for process in waiting.values():
            self.connect(process)
        self._tick()
        if world.has_pings:
            self._server.hub.ping()

    def kill(self) -> None:
        super().kill()
        self.core = None

    def connect(self, process: SimProcess) -> None:
        """Connects the process now, or when the router is up."""
        if self.core is None:
            self._waiting[process.instance_id] = process
            return
        world, hub = self._world, self._server.hub

        def latency(is_up: bool) -> float:
            seconds = world.faults.latency(process.instance_id, is_up)
            return world.latency() if seconds is None else seconds

        up, down = partial(latency, True), partial(latency, False)
        theirs = SimLink(world.clock, process, up, world.encode, process.heard, process.lost)
        ours = SimLink(world.clock, self, down, world.encode, hub.received, hub.lost)
        theirs.other, ours.other = ours, theirs
        hub.opened(ours)
        process.connected(theirs)

    def forget(self, process: SimProcess) -> None:
        self._waiting.pop(process.instance_id, None)

    def _tick(self) -> None:
        self._server.tick()
        self.after(self._world.tick_s, self._tick)
