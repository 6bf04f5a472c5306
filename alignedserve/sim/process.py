"""A process of the simulated island: starts with a new epoch, holds one connection to the router, can be killed.

Nothing of a life outlives it: timers of a killed process do not go off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from alignedserve.protocol.messages import AnyMessage, Hello, InstanceLimits
from alignedserve.sim.clock import Timer
from alignedserve.sim.network import Connection
from alignedserve.types import Epoch, InstanceId

if TYPE_CHECKING:
    from alignedserve.sim.world import World


class SimProcess:
    role: ClassVar[str]

    def __init__(self, world: World, instance_id: InstanceId) -> None:
        self.world = world
        self.instance_id = instance_id
        self.epoch = Epoch(0)
        self.is_up = False
        self._life = 0
        self._connection: Connection | None = None

    # ---- what each role says for itself ----

    def begin(self) -> None:
        """A new life, or the router's: nothing is left of what was ordered before."""

    def hello(self) -> Hello:
        return self.make_hello(InstanceLimits())

    def received(self, message: AnyMessage) -> None:
        raise NotImplementedError

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
        self.send(self.hello())

    def send(self, message: AnyMessage) -> None:
        if self._connection:
            self._connection.to_hub(message)

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        life = self._life

        def act() -> None:
            if self._life == life:
                action()

        return self.world.clock.after(delay_s, act)

    def make_hello(self, limits: InstanceLimits) -> Hello:
        return Hello(
            role=self.role,
            instance_id=self.instance_id,
            epoch=self.epoch,
            pid=0,
            fingerprint={},
            limits=limits,
        )
