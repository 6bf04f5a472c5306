"""The router's process in virtual time: the live server, on a simulated host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from alignedserve.protocol.host import Connecting
from alignedserve.protocol.messages import Hello
from alignedserve.router.eventlog import EventLog
from alignedserve.router.events import Event, Observer, Send
from alignedserve.router.router import Router
from alignedserve.router.server import RouterServer
from alignedserve.sim.host import SimHost, SimLink
from alignedserve.sim.process import SimProcess
from alignedserve.sim.world import World
from alignedserve.types import Epoch


class SimProcesses:
    """The processes of an island, as its router sees them: the part of a `RouterHost` that answers for them."""

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


class SimRouter(SimHost, SimProcesses):
    def __init__(self, world: World, make_core: Callable[[Epoch], Router]) -> None:
        SimHost.__init__(self, world.clock)
        SimProcesses.__init__(self, world)
        self._make_core = make_core
        self.core: Router | None = None
        self.observers: list[Observer] = [self._check_receivers]
        # Returns the event log of each router; None: there is none.
        self.make_log: Callable[[Epoch], EventLog] | None = None
        self._server: RouterServer

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
        self._tick()
        self._server.hub.ping()

    def kill(self) -> None:
        super().kill()
        self.core = None

    def connect(self, process: SimProcess, hello: Callable[[], Hello], handler: Connecting) -> None:
        if self.core is None:
            handler.lost(None)
            return
        world, hub = self._world, self._server.hub

        def latency(is_up: bool) -> float:
            seconds = world.faults.latency(process.instance_id, is_up)
            return world.latency() if seconds is None else seconds

        theirs = SimLink(process, partial(latency, True), world.encode, handler.received, handler.lost)
        ours = SimLink(self, partial(latency, False), world.encode, hub.received, hub.lost)
        theirs.other, ours.other = ours, theirs
        self.when_awake(partial(hub.opened, ours))
        handler.opened(theirs)
        theirs.send(hello())

    def has_left(self, process: SimProcess) -> bool:
        return all(link.is_over for link in process.links)

    def _check_receivers(self, now: float, event: Event, orders: list[Send]) -> None:
        for send in orders:
            if not self._server.is_here(send.to):
                message = type(send.message).__name__
                raise RuntimeError(
                    f"the router sends {send.to} a {message}, and has been told that it has gone"
                )

    def _tick(self) -> None:
        self._server.tick()
        self.after(self._world.tick_s, self._tick)
