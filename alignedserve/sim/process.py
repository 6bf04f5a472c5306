"""A process of the simulated island: it starts with a new epoch, holds one connection to the router, and can be killed.

Nothing outlives a life of the process: timers of a killed process do not fire.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from alignedserve.protocol.connection import NUM_PINGS
from alignedserve.protocol.messages import AnyMessage, Hello, InstanceLimits, Ping, Pong, Welcome
from alignedserve.sim.clock import LocalClock, Timer
from alignedserve.sim.hanging import CanHang
from alignedserve.sim.network import Connection
from alignedserve.types import Epoch, InstanceId

if TYPE_CHECKING:
    from alignedserve.sim.world import World


# Greater than the ids of all other processes of a simulation.
_FIRST_PID = 1000


class SimProcess(CanHang):
    role: str

    def __init__(self, world: World, instance_id: InstanceId) -> None:
        super().__init__(LocalClock(world.clock))
        self.world = world
        self.instance_id = instance_id
        self.epoch = Epoch(0)
        self.is_up = False
        self._life = 0
        self._connection: Connection | None = None
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
        self.end_life()
        self.forget_held()
        self.is_up = False
        self.world.router.forget(self)
        if self._connection:
            self._connection.close_by_client()
            self._connection = None

    def router_closed(self) -> None:
        self.end_life()
        self._connection = None
        self.begin()
        self.world.router.connect(self)

    def end_life(self) -> None:
        self._life += 1

    def connected(self, connection: Connection) -> None:
        self._connection = connection
        self._num_silent = 0
        self.send(self.hello())

    def send(self, message: AnyMessage) -> None:
        if self._connection:
            self._connection.to_hub(message)

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        return self.world.clock.after(delay_s, partial(self._act_awake, self._life, action))

    def _act_awake(self, life: int, action: Callable[[], None]) -> None:
        if self.is_hung:
            self.when_awake(partial(self._act, life, action))
        elif self._life == life:
            action()

    def _act(self, life: int, action: Callable[[], None]) -> None:
        if self._life == life:
            action()

    # ---- the connection, as in alignedserve/protocol/connection.py ----

    def heard(self, connection: Connection, message: AnyMessage) -> None:
        self._num_silent = 0
        if isinstance(message, Ping):
            self.send(Pong())
            return
        if isinstance(message, Welcome) and self.world.has_pings and message.silence_s:
            self._watch(connection, message.silence_s / NUM_PINGS)
        self.received(message)

    def _watch(self, connection: Connection, watch_s: float) -> None:
        """Checks whether the router has sent anything. Counts checks, not seconds."""
        if connection is not self._connection:
            return
        if self._num_silent > NUM_PINGS:
            connection.cut_by_client()
            self.router_closed()
            return
        self._num_silent += 1
        look = partial(self._watch, connection, watch_s)
        self.world.clock.after(watch_s, lambda: self.when_awake(look))

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
