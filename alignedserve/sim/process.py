"""A process of the simulated island: it starts with a new epoch, holds one connection to the router, and can be
killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.connection import ConnectionHandler, RouterConnection
from alignedserve.protocol.host import Connecting
from alignedserve.protocol.messages import AnyMessage, Hello, InstanceLimits, Message, Welcome
from alignedserve.router.router import Router
from alignedserve.sim.clock import Clock
from alignedserve.sim.host import SimHost
from alignedserve.types import Epoch, InstanceId

# Greater than the ids of all other processes of a simulation.
_FIRST_PID = 1000
# An island has one router.
_ADDRESS = RouterAddress("router", 1, "")


class IslandRouter(Protocol):
    """The router, as the island's other processes use it."""

    # None while the router is down.
    core: Router | None

    def connect(self, process: SimProcess, hello: Callable[[], Hello], handler: Connecting) -> None: ...

    def has_left(self, process: SimProcess) -> bool:
        """Returns whether it has closed the process's connection, even if the process has not noticed yet."""


class ProcessWorld(Protocol):
    """The part of the world that each process uses."""

    clock: Clock
    router: IslandRouter

    def next_epoch(self) -> Epoch: ...


class SimProcess(SimHost):
    role: str
    # Whether it connects again only after it has dropped all orders.
    drops_orders: ClassVar[bool] = False

    def __init__(self, world: ProcessWorld, instance_id: InstanceId) -> None:
        super().__init__(world.clock)
        self.world = world
        self.instance_id = instance_id
        self.epoch = Epoch(0)
        self.is_up = False
        self._link: RouterConnection

    # ---- what each role defines ----

    def begin(self) -> ConnectionHandler:
        """Starts a new life. Returns what handles the connection to the router."""
        return self

    def hello(self) -> Hello:
        return self.make_hello(InstanceLimits())

    def on_up(self, welcome: Welcome) -> None:
        pass

    def on_message(self, message: AnyMessage) -> None:
        raise NotImplementedError

    def on_down(self) -> None:
        pass

    def maps(self, segment: str) -> bool:
        """Returns whether it could write to this segment."""
        return False

    @property
    def pid(self) -> int:
        """Names one life of the process, in one role."""
        return _FIRST_PID + self.epoch

    # ---- life ----

    def start(self) -> None:
        if self.is_up:
            raise RuntimeError(f"{self.instance_id} is started, but is up with epoch {self.epoch}")
        self.is_up = True
        self.epoch = self.world.next_epoch()
        self._link = RouterConnection(_ADDRESS, self.hello, self.begin(), self.drops_orders, self)
        self._link.begin()

    def kill(self) -> None:
        super().kill()
        self.is_up = False

    def connect(self, address: RouterAddress, hello: Callable[[], Hello], process: Connecting) -> None:
        self.world.router.connect(self, hello, process)

    def send(self, message: Message) -> None:
        if self.is_up:
            self._link.send(message)

    def cut(self) -> None:
        """Cuts its connection, and loses all messages on their way."""
        for link in self.links:
            link.cut()

    def make_hello(self, limits: InstanceLimits) -> Hello:
        return Hello(
            role=self.role,
            instance_id=self.instance_id,
            epoch=self.epoch,
            pid=self.pid,
            fingerprint={},
            limits=limits,
        )
