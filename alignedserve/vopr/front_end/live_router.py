"""A simulated island's router, with sockets on the virtual network.

It replaces the simulator's own router (alignedserve/sim/router.py), where messages go from process to process without
sockets. Here they are bytes, with a handshake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.host import Connecting, LiveHost
from alignedserve.protocol.messages import Hello
from alignedserve.router.eventlog import EventLog
from alignedserve.router.events import Observer
from alignedserve.router.router import Router
from alignedserve.router.server import RouterServer
from alignedserve.sim.process import SimProcess
from alignedserve.sim.router import SimProcesses
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
        self._host = LiveHost()
        # Each process's sockets.
        self._sockets: dict[InstanceId, VirtualProcess] = {}

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

    def connect(self, process: SimProcess, hello: Callable[[], Hello], handler: Connecting) -> None:
        name = process.instance_id
        if not process.parts:
            self._sockets[name] = self._loop.new_process(f"{self._address.host}/{name}")
            process.parts.append(self._sockets[name])
        context = self._sockets[name].context
        self._loop.call_soon(self._host.connect, self._address, hello, handler, context=context)

    def has_left(self, process: SimProcess) -> bool:
        """Returns whether the router's kernel has closed the process's latest connection."""
        owner, connections = self._sockets[process.instance_id], self._loop.network.connections.values()
        ours = [each for each in connections if each.owner is owner]
        return not ours or ours[-1].server.is_over


class _RouterHost(SimProcesses, LiveHost):
    """The virtual loop's clock, and the island's processes."""

    def __init__(self, world: World) -> None:
        SimProcesses.__init__(self, world)
        LiveHost.__init__(self)


def watched(loop: VirtualLoop, task: asyncio.Task[None]) -> None:
    """Reports an error that ends the task as an error of the run."""

    def over(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            loop.call_exception_handler({"message": f"{task.get_name()} failed", "exception": error})

    task.add_done_callback(over)
