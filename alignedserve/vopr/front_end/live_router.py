"""A simulated island's router with the real server around the core, on the virtual network.

It replaces the simulator's own router (alignedserve/sim/router.py). The island's processes are simulated, but each has
a real connection to the router, with handshake and pings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.connection import RouterConnection
from alignedserve.protocol.host import LiveHost
from alignedserve.protocol.messages import AnyMessage, Hello, Message, Welcome
from alignedserve.router.eventlog import EventLog
from alignedserve.router.events import Observer
from alignedserve.router.router import Router
from alignedserve.router.server import RouterServer
from alignedserve.sim.fence import SimProcesses
from alignedserve.sim.process import SimProcess
from alignedserve.sim.world import World
from alignedserve.types import Epoch, InstanceId
from alignedserve.vopr.front_end.virtual_loop import VirtualLoop
from alignedserve.vopr.front_end.virtual_process import VirtualProcess


class LiveRouter:
    def __init__(
        self,
        loop: VirtualLoop,
        world: World,
        address: RouterAddress,
        make_core: Callable[[Epoch], Router],
        expected: Mapping[InstanceId, str],
    ) -> None:
        """`expected`: the role of each process that may connect."""
        self.core: Router | None = None
        self.process: VirtualProcess | None = None
        self.observers: list[Observer] = []
        # Returns the event log of each router; None: there is none.
        self.make_log: Callable[[Epoch], EventLog] | None = None
        self._loop = loop
        self._world = world
        self._address = address
        self._make_core = make_core
        self._expected = dict(expected)
        self._links: dict[InstanceId, _Link] = {}

    @property
    def is_up(self) -> bool:
        return self.core is not None

    @property
    def is_hung(self) -> bool:
        return self.process is not None and self.process.is_hung

    def start(self) -> None:
        if self.core:
            raise RuntimeError("the router is started, but is already up")
        epoch = self._world.next_epoch()
        self.core = self._make_core(epoch)
        self.process = self._loop.new_process(f"{self._address.host}/router {epoch}")
        watched(self._loop, self.process.start(self._run(self.core, epoch)))

    def kill(self) -> None:
        if self.process:
            self.process.kill()
        self.core = self.process = None

    def hang(self) -> None:
        if self.process:
            self.process.hang()

    def wake_up(self) -> None:
        if self.process:
            self.process.wake_up()

    async def _run(self, core: Router, epoch: Epoch) -> None:
        log = self.make_log(epoch) if self.make_log else None
        host = _RouterHost(self._world)
        server = RouterServer(core, epoch, self._address.token, self._expected, log, host=host)
        server.observers = self.observers
        await server.listen_at(self._address)
        await server.run()

    # ---- the island's processes ----

    def connect(self, process: SimProcess) -> None:
        """Connects the process. One that was connected before has now dropped all orders, and its link connects again
        by itself."""
        if link := self._links.get(process.instance_id):
            link.process_has_dropped()
        else:
            self._links[process.instance_id] = _Link(self._loop, self._address, process)

    def forget(self, process: SimProcess) -> None:
        if link := self._links.pop(process.instance_id, None):
            link.virtual.kill()

    def connection_of(self, process: SimProcess) -> VirtualProcess | None:
        link = self._links.get(process.instance_id)
        return link.virtual if link else None


class _RouterHost(SimProcesses, LiveHost):
    """The virtual loop's clock, and the island's processes."""


class LinkedProcess:
    """A simulated process of an island, with its connection."""

    def __init__(self, process: SimProcess, router: LiveRouter) -> None:
        self.start, self.kill = process.start, process.kill
        self._process = process
        self._router = router

    @property
    def is_up(self) -> bool:
        return self._process.is_up

    @property
    def is_hung(self) -> bool:
        return self._process.is_hung

    def hang(self) -> None:
        self._process.hang()
        if connection := self._router.connection_of(self._process):
            connection.hang()

    def wake_up(self) -> None:
        self._process.wake_up()
        if connection := self._router.connection_of(self._process):
            connection.wake_up()


class _Link:
    """A simulated process's connection, which is real from here on."""

    def __init__(self, loop: VirtualLoop, address: RouterAddress, process: SimProcess) -> None:
        self._process = process
        self._network = loop.network
        self._hello: Hello | None = None
        # Whether nothing is left of an earlier connection's orders, as in `instance/process.py`.
        self._dropped = asyncio.Event()
        self._dropped.set()
        self._link = RouterConnection(address, self._introduce, self, self._dropped.wait)
        self.virtual = loop.new_process(f"{address.host}/{process.instance_id}")
        watched(loop, self.virtual.start(self._link.run()))

    def _introduce(self) -> Hello:
        # The process sends its Hello as soon as it has a connection.
        self._process.connected(self)  # type: ignore[arg-type]
        assert self._hello
        return self._hello

    @property
    def is_over(self) -> bool:
        """Whether the router's kernel has closed the latest connection."""
        ours = [each for each in self._network.connections.values() if each.owner is self.virtual]
        return not ours or ours[-1].server.is_over

    # ---- what the process sends ----

    def send(self, message: Message) -> None:
        if isinstance(message, Hello):
            self._hello = message
        else:
            self._link.send(message)

    def process_has_dropped(self) -> None:
        self._dropped.set()

    # ---- callbacks of the connection ----

    def on_up(self, welcome: Welcome) -> None:
        self._process.received(welcome)

    def on_message(self, message: AnyMessage) -> None:
        self._process.received(message)

    def on_down(self) -> None:
        self._dropped.clear()
        self._process.router_closed()


def watched(loop: VirtualLoop, task: asyncio.Task[None]) -> None:
    """Reports an error that ends the task as an error of the run."""

    def over(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            loop.call_exception_handler({"message": f"{task.get_name()} failed", "exception": error})

    task.add_done_callback(over)
