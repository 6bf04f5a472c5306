"""A simulated island's router, with sockets on the virtual network.

It replaces the simulator's own router (alignedserve/sim/router.py), where messages go from process to process without
sockets. Here they are bytes, with a handshake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.host import Connecting, LiveHost
from alignedserve.protocol.messages import Hello
from alignedserve.router.server import RouterServer
from alignedserve.sim.island import IslandSettings
from alignedserve.sim.process import SimProcess
from alignedserve.sim.router import RouterShell
from alignedserve.sim.world import World
from alignedserve.types import InstanceId
from alignedserve.vopr.front_end.virtual_loop import VirtualLoop
from alignedserve.vopr.front_end.virtual_process import Lives, VirtualProcess


class LiveRouter(Lives, RouterShell):
    def __init__(
        self,
        loop: VirtualLoop,
        address: RouterAddress,
        gateways: Sequence[InstanceId],
        world: World,
        config: IslandSettings,
    ) -> None:
        super().__init__(world, config.router, config.scheduling)
        self._loop = loop
        self._address = address
        self._gateways = gateways
        # The virtual loop's time and connections.
        self._host = LiveHost()
        self.now, self.after = self._host.now, self._host.after
        # Each process's sockets.
        self._sockets: dict[InstanceId, VirtualProcess] = {}

    def start(self) -> None:
        epoch = self._world.next_epoch()
        server = self._make_server(self, epoch, self._address.token, self._gateways)
        self.process = self._loop.new_process(f"{self._address.host}/router {epoch}")
        self.process.start(self._run(server))

    def kill(self) -> None:
        super().kill()
        self.core = None

    async def _run(self, server: RouterServer) -> None:
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
