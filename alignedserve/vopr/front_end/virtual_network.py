"""Connections between processes in virtual time, and their faults.

A driver may delay a connection, stall it for a while, cut it and lose everything on its way, leave it half-open, or
refuse new ones. It also sets how long bytes take, and in what pieces they arrive.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable

from alignedserve.sim.clock import Clock
from alignedserve.vopr.front_end.journal import Journal
from alignedserve.vopr.front_end.virtual_process import VirtualProcess, current_process
from alignedserve.vopr.front_end.virtual_transport import VirtualSocket, VirtualTransport
from alignedserve.vopr.front_end.virtual_wire import Way

# Seconds that a byte takes over loopback, and the bytes that two sockets on it hold.
LATENCY_S = 0.0003
WINDOW_BYTES = 256 << 10
# The first port for listeners that request none.
FIRST_PORT = 30_000

Address = tuple[str, int]


class VirtualNetwork:
    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock, journal: Journal) -> None:
        self.loop = loop
        self.clock = clock
        self.journal = journal
        # Seconds that the next piece takes, and its most bytes: by the process that has connected, and by whether that
        # process sends it.
        self.latency: Callable[[str, bool], float] = lambda process, is_up: LATENCY_S
        self.piece_bytes: Callable[[str, bool], int] = lambda process, is_up: WINDOW_BYTES
        self.window_bytes = WINDOW_BYTES
        # The connections that are open at one end at least, the oldest first.
        self.connections: dict[int, VirtualConnection] = {}
        # Addresses at which new connections are refused, even with a listener.
        self.refused: set[Address] = set()
        self._servers: dict[Address, VirtualServer] = {}
        self._num_connections = 0
        self._num_ports = 0

    def listen(self, factory: Callable[[], asyncio.Protocol], host: str, port: int) -> VirtualServer:
        """Raises OSError if another process listens there. A Unix socket has its path as host."""
        address = (host, port or self._new_port())
        if address in self._servers:
            raise OSError(f"{address}: another process listens there")
        self._servers[address] = server = VirtualServer(self, address, factory)
        return server

    def close(self, server: VirtualServer) -> None:
        if self._servers.get(server.address) is server:
            del self._servers[server.address]

    async def connect(
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[VirtualTransport, asyncio.Protocol]:
        await asyncio.sleep(self.latency(_name_of(current_process()), True))
        server = self._servers.get((host, port))
        if server is None or server.address in self.refused:
            raise ConnectionRefusedError(f"{host}:{port}: refused")
        self._num_connections += 1
        connection = VirtualConnection(self, self._num_connections, server.address)
        self.connections[connection.number] = connection
        return connection.client, connection.open(factory, server)

    def _new_port(self) -> int:
        self._num_ports += 1
        return FIRST_PORT + self._num_ports


class VirtualServer:
    """A listener at an address, for the process that created it."""

    def __init__(
        self, network: VirtualNetwork, address: Address, factory: Callable[[], asyncio.Protocol]
    ) -> None:
        self.address = address
        self.sockets = (VirtualSocket(address),)
        self.factory = factory
        self.context = contextvars.copy_context()
        self._network = network
        if process := current_process():
            process.on_kill(self, self.close)

    def is_serving(self) -> bool:
        return self._network._servers.get(self.address) is self

    def close(self) -> None:
        self._network.close(self)

    async def wait_closed(self) -> None:
        return


class VirtualConnection:
    def __init__(self, network: VirtualNetwork, number: int, address: Address) -> None:
        self.network = network
        self.number = number
        # The process at each end, by which a driver can choose: the one that connected, and the address that it
        # connected to.
        self.owner = current_process()
        self.process = _name_of(self.owner)
        self.address = address
        # Seconds by which bytes take longer than on other connections.
        self.delay_s = 0.0
        # A port of its own, which distinguishes the connections of one process.
        name = (self.process, number)
        self.client = VirtualTransport(self, name, address)
        self.server = VirtualTransport(self, address, name)
        self._num_open = 2

    def __str__(self) -> str:
        return f"connection {self.number}"

    def open(self, factory: Callable[[], asyncio.Protocol], server: VirtualServer) -> asyncio.Protocol:
        up, down = self._up, self._down = self._way(is_up=True), self._way(is_up=False)
        self.client.attach(up, down, contextvars.copy_context())
        self.server.attach(down, up, server.context.copy())
        # The server's kernel accepts the connection at once. Its process makes the protocol when it runs.
        self.loop.call_soon(self.server.begin, server.factory, context=server.context)
        return self.client.begin(factory)

    def _way(self, is_up: bool) -> Way:
        """`is_up`: from the process that has connected."""
        network, process = self.network, self.process
        return Way(
            network.clock,
            lambda: network.latency(process, is_up) + self.delay_s,
            lambda: network.piece_bytes(process, is_up),
        )

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self.network.loop

    @property
    def window_bytes(self) -> int:
        return self.network.window_bytes

    def note_read(self, name: tuple[str, int], num_bytes: int) -> None:
        self.network.journal.add(self, name, num_bytes)

    def end_is_over(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self.network.connections.pop(self.number, None)

    # ---- faults ----

    def stall(self, seconds: float) -> None:
        """Lets nothing arrive for this time, in both directions, and then everything."""
        for way in (self._up, self._down):
            way.stalled_until_s = self.network.clock.now + seconds

    def cut(self) -> None:
        """Cuts the connection at both ends at once, and loses everything on its way."""
        for way in (self._up, self._down):
            way.lose()
        for end in (self.client, self.server):
            end.vanish(ConnectionResetError("the connection was cut"))

    def half_open(self, gone: VirtualTransport) -> None:
        """Ends the connection at one end, and loses everything on its way. The other end notices when it next sends
        something."""
        for way in (self._up, self._down):
            way.lose()
        gone.vanish(ConnectionResetError("the connection was cut"))

    def vanish(self) -> None:
        """Removes the wire: nothing ever arrives again, and neither end is notified."""
        self.stall(float("inf"))


def _name_of(process: VirtualProcess | None) -> str:
    """Returns the name that all lives of the process share."""
    return process.name.split(" ")[0] if process else "driver"
