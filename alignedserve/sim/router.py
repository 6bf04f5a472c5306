"""The router's process in virtual time: the hub around the same core as in the real one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from alignedserve.protocol.connection import NUM_PINGS
from alignedserve.protocol.messages import AnyMessage, Hello, Ping, Pong, Refused
from alignedserve.router.eventlog import EventLog
from alignedserve.router.events import Closed, Connected, Event, Observer, Received, Send, Tick
from alignedserve.router.fence import Parting
from alignedserve.router.router import Router
from alignedserve.sim.clock import LocalClock
from alignedserve.sim.fence import SimRouterHost
from alignedserve.sim.hanging import CanHang
from alignedserve.sim.network import Connection
from alignedserve.sim.process import SimProcess
from alignedserve.types import Epoch, InstanceId

if TYPE_CHECKING:
    from alignedserve.sim.world import World

# Seconds after which a pool that has connected too early is disconnected, to connect again.
PUT_OFF_S = 0.25


class RouterProcess(CanHang):
    def __init__(self, world: World, make_core: Callable[[Epoch], Router]) -> None:
        super().__init__(LocalClock(world.clock))
        self._world = world
        self._make_core = make_core
        self.core: Router | None = None
        self.observers: list[Observer] = []
        self._waiting: dict[InstanceId, SimProcess] = {}
        self._anonymous: list[Connection] = []
        # The connections of processes that have sent Hello.
        self._connections: dict[InstanceId, Connection] = {}
        self._hellos: dict[Connection, Hello] = {}
        # Returns the event log of each router; None: there is none.
        self.make_log: Callable[[Epoch], EventLog] | None = None
        self._log: EventLog | None = None
        # Pings since anything last arrived on each connection.
        self._num_unanswered: Counter[Connection] = Counter()
        self._host = SimRouterHost(world)
        self._parting: Parting

    @property
    def is_up(self) -> bool:
        return self.core is not None

    def start(self) -> None:
        if self.core:
            raise RuntimeError("the router is started, but is already up")
        epoch = self._world.next_epoch()
        self.core = self._make_core(epoch)
        self._log = self.make_log(epoch) if self.make_log else None
        self._parting = Parting(self.core.state.config.silence_s, self._host)
        waiting, self._waiting = self._waiting, {}
        for process in waiting.values():
            self.connect(process)
        self._tick(self.core)
        if self._world.has_pings:
            self._ping(self.core)

    def kill(self) -> None:
        self.core = None
        self.forget_held()
        for connection in (*self._anonymous, *self._connections.values()):
            connection.close_by_hub()
        self._anonymous, self._connections, self._hellos = [], {}, {}
        self._num_unanswered.clear()

    # ---- connections ----

    def connect(self, process: SimProcess) -> None:
        """Connects the process now, or when the router is up."""
        if self.core is None:
            self._waiting[process.instance_id] = process
            return
        world, name = self._world, process.instance_id

        def latency(is_up: bool) -> float:
            seconds = world.faults.latency(name, is_up)
            return world.latency() if seconds is None else seconds

        up, down = partial(latency, True), partial(latency, False)
        connection = Connection(world.clock, up, down, process, self, world.encode)
        self._anonymous.append(connection)
        process.connected(connection)

    def forget(self, process: SimProcess) -> None:
        self._waiting.pop(process.instance_id, None)

    def received(self, connection: Connection, message: AnyMessage) -> None:
        self._num_unanswered[connection] = 0
        if isinstance(message, Pong):
            return
        hello = self._hellos.get(connection)
        if isinstance(message, Hello):
            if hello is None:
                self._welcome(connection, message)
            else:
                self._hello_again(connection, message)
        elif hello is not None:
            self._step(Received(hello.instance_id, message))
        else:
            raise RuntimeError(f"the first message of a connection is {message}, not a Hello")

    def _welcome(self, connection: Connection, hello: Hello) -> None:
        """Accepts a Hello. A process that returns may be faster than the notice of its death, even than the Hello of
        its first life."""
        earlier = self._connections.get(hello.instance_id)
        if earlier and self._hellos[earlier].epoch > hello.epoch:
            self._anonymous.remove(connection)
            connection.close_by_hub()
            return
        if earlier:
            earlier.close_by_hub()
            self.client_closed(earlier)
        if hello.role == "kvpool" and self._puts_off(hello):
            self._world.clock.after(PUT_OFF_S, partial(self._turn_away, connection))
            return
        self._anonymous.remove(connection)
        self._connections[hello.instance_id] = connection
        self._hellos[connection] = hello
        if hello.role == "kvpool":
            self._parting.segment = hello.segment
        if parted := self._parting.back(hello):
            self._step(Closed(parted.instance_id, parted.epoch))
        self._step(Connected(hello))

    def _hello_again(self, connection: Connection, hello: Hello) -> None:
        """Handles the Hello of an instance that has taken another role."""
        before, self._hellos[connection] = self._hellos[connection], hello
        self._parting.back(hello)
        self._step(Closed(before.instance_id, before.epoch))
        self._step(Connected(hello))

    def client_closed(self, connection: Connection) -> None:
        self._num_unanswered.pop(connection, None)
        hello = self._hellos.pop(connection, None)
        if hello is None:
            self._anonymous.remove(connection)
            return
        del self._connections[hello.instance_id]
        if not self._parting.add(hello):
            self._step(Closed(hello.instance_id, hello.epoch))

    # ---- processes that hang, as in alignedserve/protocol/hub.py ----

    def _ping(self, core: Router) -> None:
        if self.core is not core:
            return
        for connection, hello in list(self._hellos.items()):
            self._num_unanswered[connection] += 1
            num_unanswered = self._num_unanswered[connection]
            if num_unanswered <= NUM_PINGS:
                connection.to_client(Ping())
            elif num_unanswered == NUM_PINGS + 1:
                self._host.kill_user(hello.pid, self._parting.segment)
            else:
                connection.cut_by_hub()
                self.client_closed(connection)
        ping = partial(self._ping, core)
        self._world.clock.after(core.state.config.silence_s / NUM_PINGS, lambda: self.when_awake(ping))

    def _puts_off(self, pool: Hello) -> bool:
        return self._parting.puts_off(pool, {hello.pid for hello in self._hellos.values()})

    def _turn_away(self, connection: Connection) -> None:
        if connection in self._anonymous:
            self._anonymous.remove(connection)
            connection.cut_by_hub()

    # ---- the core ----

    def _tick(self, core: Router) -> None:
        if self.core is core:
            for hello in self._parting.take_gone():
                self._step(Closed(hello.instance_id, hello.epoch))
            self._step(Tick())
            tick = partial(self._tick, core)
            self._world.clock.after(self._world.tick_s, lambda: self.when_awake(tick))

    def _step(self, event: Event) -> None:
        now, core = self.local_clock.now(), self.core
        if core is None:
            raise RuntimeError(f"{event} reaches a router that is not up")
        if self._log:
            self._log.append(now, event)
        sends = core.on(event, now)
        if self._log:
            self._log.answered(sends)
        for observer in self.observers:
            observer(now, event, sends)
        for send in sends:
            self._send(send)

    def _send(self, send: Send) -> None:
        if send.to in self._parting:
            return
        connection = self._connections[send.to]
        connection.to_client(send.message)
        if isinstance(send.message, Refused):
            del self._connections[send.to], self._hellos[connection]
            connection.close_by_hub()
