"""The router's process in virtual time: the hub around the very core that the real one runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from alignedserve.protocol.messages import AnyMessage, Hello, Refused
from alignedserve.router.events import Closed, Connected, Event, Received, Send, Tick
from alignedserve.router.router import Router
from alignedserve.sim.network import Connection
from alignedserve.sim.process import SimProcess
from alignedserve.types import Epoch, InstanceId

if TYPE_CHECKING:
    from alignedserve.sim.world import World

TICK_S = 0.05
# An observer is called at every step of the core with the time in seconds, the event, and the core's answers.
Observer = Callable[[float, Event, list[Send]], None]


class RouterProcess:
    def __init__(self, world: World, make_core: Callable[[Epoch], Router]) -> None:
        self._world = world
        self._make_core = make_core
        self.core: Router | None = None
        self.observers: list[Observer] = []
        self._waiting: dict[InstanceId, SimProcess] = {}
        self._anonymous: list[Connection] = []
        # Holds the connections of processes that have said which instance they are.
        self._connections: dict[InstanceId, Connection] = {}
        self._hellos: dict[Connection, Hello] = {}

    @property
    def is_up(self) -> bool:
        return self.core is not None

    def start(self) -> None:
        if self.core:
            raise RuntimeError("the router is started, but is up")
        self.core = self._make_core(self._world.next_epoch())
        waiting, self._waiting = self._waiting, {}
        for process in waiting.values():
            self.connect(process)
        self._tick(self.core)

    def kill(self) -> None:
        self.core = None
        for connection in (*self._anonymous, *self._connections.values()):
            connection.close_by_hub()
        self._anonymous, self._connections, self._hellos = [], {}, {}

    # ---- connections ----

    def connect(self, process: SimProcess) -> None:
        """Now, or once the router is up."""
        if self.core is None:
            self._waiting[process.instance_id] = process
            return
        world = self._world
        connection = Connection(world.clock, world.latency, process, self, world.encode)
        self._anonymous.append(connection)
        process.connected(connection)

    def forget(self, process: SimProcess) -> None:
        self._waiting.pop(process.instance_id, None)

    def received(self, connection: Connection, message: AnyMessage) -> None:
        if connection in self._hellos:
            self._step(Received(self._hellos[connection].instance_id, message))
        elif isinstance(message, Hello):
            self._welcome(connection, message)
        else:
            raise RuntimeError(f"the first message of a connection is {message}, not a Hello")

    def _welcome(self, connection: Connection, hello: Hello) -> None:
        """A process that comes back may be faster than the notice of its death, even than its first life's greeting."""
        earlier = self._connections.get(hello.instance_id)
        if earlier and self._hellos[earlier].epoch > hello.epoch:
            self._anonymous.remove(connection)
            connection.close_by_hub()
            return
        if earlier:
            earlier.close_by_hub()
            self.client_closed(earlier)
        self._anonymous.remove(connection)
        self._connections[hello.instance_id] = connection
        self._hellos[connection] = hello
        self._step(Connected(hello))

    def client_closed(self, connection: Connection) -> None:
        hello = self._hellos.pop(connection, None)
        if hello is None:
            self._anonymous.remove(connection)
            return
        del self._connections[hello.instance_id]
        self._step(Closed(hello.instance_id, hello.epoch))

    # ---- the core ----

    def _tick(self, core: Router) -> None:
        if self.core is core:
            self._step(Tick())
            self._world.clock.after(TICK_S, lambda: self._tick(core))

    def _step(self, event: Event) -> None:
        now, core = self._world.clock.now, self.core
        if core is None:
            raise RuntimeError(f"{event} reaches a router that is not up")
        sends = core.on(event, now)
        for observer in self.observers:
            observer(now, event, sends)
        for send in sends:
            self._send(send)

    def _send(self, send: Send) -> None:
        connection = self._connections[send.to]
        connection.to_client(send.message)
        if isinstance(send.message, Refused):
            del self._connections[send.to], self._hellos[connection]
            connection.close_by_hub()
