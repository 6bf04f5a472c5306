"""The router's process in virtual time: the live server, on a simulated host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import BinaryIO

from alignedserve.protocol.host import Connecting
from alignedserve.protocol.messages import Hello
from alignedserve.router.config import RouterConfig
from alignedserve.router.eventlog import EventLog
from alignedserve.router.events import Event, Observer, Send
from alignedserve.router.fence import RouterHost
from alignedserve.router.router import Router
from alignedserve.router.server import RouterServer
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.host import SimHost, SimLink
from alignedserve.sim.process import SimProcess
from alignedserve.sim.world import World
from alignedserve.types import Epoch, InstanceId


class RouterShell:
    """An island's router, without its time and connections. Each of its lives has a core, a server and an event log. As
    a `RouterHost`, it answers for the island's processes."""

    def __init__(self, world: World, config: RouterConfig, scheduling: SchedulingConfig) -> None:
        # None while it is down.
        self.core: Router | None = None
        self.observers: list[Observer] = []
        # Opens the file of a life's event log; None: there is none.
        self.open_log: Callable[[Epoch], BinaryIO] | None = None
        self._roles: dict[InstanceId, str] = {}
        self._world = world
        self._config = config
        self._scheduling = scheduling

    def _make_server(
        self, host: RouterHost, epoch: Epoch, token: str = "", gateways: Sequence[InstanceId] = ()
    ) -> RouterServer:
        """Begins a life. `gateways`: those beside the world's."""
        if self.core:
            raise RuntimeError("the router is started, but is already up")
        config, scheduling = self._config, self._scheduling
        self.core = Router(config, epoch, scheduling)
        # Those of the plan: an instance that takes another one is still expected in its first.
        self._roles = {name: each.role for name, each in self._world.processes.items()} | self._roles
        log = EventLog(self.open_log(epoch), config, epoch, scheduling) if self.open_log else None
        server = RouterServer(self.core, epoch, token, self._roles, log, gateways, host)
        server.observers = self.observers
        return server

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


class SimRouter(SimHost, RouterShell):
    def __init__(self, world: World, config: RouterConfig, scheduling: SchedulingConfig) -> None:
        SimHost.__init__(self, world.clock)
        RouterShell.__init__(self, world, config, scheduling)
        self.observers.append(self._check_receivers)
        self._server: RouterServer

    @property
    def is_up(self) -> bool:
        return self.core is not None

    def start(self) -> None:
        self._server = self._make_server(self, self._world.next_epoch())
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
