"""A process of the simulated island: it starts with a new epoch, holds one connection to the router, and can be
killed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from alignedserve.protocol.connection import NUM_PINGS
from alignedserve.protocol.host import Link
from alignedserve.protocol.messages import AnyMessage, Hello, InstanceLimits, Ping, Pong, Welcome
from alignedserve.sim.host import SimHost
from alignedserve.sim.network import SimLink
from alignedserve.types import Epoch, InstanceId

if TYPE_CHECKING:
    from alignedserve.sim.world import World


# Greater than the ids of all other processes of a simulation.
_FIRST_PID = 1000


class SimProcess(SimHost):
    role: str

    def __init__(self, world: World, instance_id: InstanceId) -> None:
        super().__init__(world.clock)
        self.world = world
        self.instance_id = instance_id
        self.epoch = Epoch(0)
        self.is_up = False
        self._connection: SimLink | None = None
        # Checks since the router last sent anything.
        self._num_silent = 0

    # ---- what each role defines ----

    def begin(self) -> None:
        """Starts a new life, or continues after the router's death: nothing is left of earlier orders."""

    def hello(self) -> Hello:
        return self.make_hello(InstanceLimits())

    def received(self, message: AnyMessage) -> None:
        raise NotImplementedError

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
        self.begin()
        self.world.router.connect(self)

    def kill(self) -> None:
        super().kill()
        self.is_up = False
        self.world.router.forget(self)
        self._connection = None

    def router_closed(self) -> None:
        self.end_life()
        self._connection = None
        self.begin()
        self.world.router.connect(self)

    def connected(self, connection: SimLink) -> None:
        self._connection = connection
        self._num_silent = 0
        self.send(self.hello())

    def send(self, message: AnyMessage) -> None:
        if self._connection:
            self._connection.send(message)

    # ---- the connection, as in alignedserve/protocol/connection.py ----

    def heard(self, connection: Link, message: AnyMessage) -> None:
        self._num_silent = 0
        if isinstance(message, Ping):
            self.send(Pong())
            return
        if isinstance(message, Welcome) and self.world.has_pings and message.silence_s:
            self._watch(connection, message.silence_s / NUM_PINGS)
        self.received(message)

    def lost(self, connection: Link) -> None:
        if connection is self._connection:
            self.router_closed()

    def _watch(self, connection: Link, watch_s: float) -> None:
        """Checks whether the router has sent anything. Counts checks, not seconds."""
        if connection is not self._connection:
            return
        if self._num_silent > NUM_PINGS:
            connection.abort()
            return
        self._num_silent += 1
        self.after(watch_s, partial(self._watch, connection, watch_s))

    def cut(self) -> None:
        """Cuts its connection, and loses all messages on their way."""
        if self._connection:
            self._connection.cut()

    def make_hello(self, limits: InstanceLimits) -> Hello:
        return Hello(
            role=self.role,
            instance_id=self.instance_id,
            epoch=self.epoch,
            pid=self.pid,
            fingerprint={},
            limits=limits,
        )
