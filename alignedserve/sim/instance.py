"""Simulated prefill and decode instances: the real ones, over an engine and copies in virtual time.

Their loop is the live one (`instance/loop.py`). A clock repeats it here in place of a thread.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from alignedserve.decode_worker.worker import ColocatedWorker, DecodeWorker
from alignedserve.instance.loop import Down, Messenger, Up, WorkerLoop
from alignedserve.instance.worker import Step, Worker
from alignedserve.prefill_worker.worker import PrefillWorker
from alignedserve.protocol.messages import PREFILL, AnyMessage, Hello, InstanceLimits
from alignedserve.scheduling.policies import Policy
from alignedserve.sim.clock import SimTimer
from alignedserve.sim.executor import SimEngine
from alignedserve.sim.grammars import SimThreads
from alignedserve.sim.host_links import Ports
from alignedserve.sim.process import SimProcess
from alignedserve.sim.transfers import SimChannels, SimTransfers
from alignedserve.sim.trusting import TrustingEngine, TrustingTransfers
from alignedserve.sim.world import World
from alignedserve.timing.estimate import Estimate
from alignedserve.transport.completions import TransferIds
from alignedserve.types import InstanceId

# Seconds in which an instance takes another role, when nothing is left to do: threads end and start.
ROLE_CHANGE_S = 0.1


class SimInstance(SimProcess):
    drops_orders = True
    worker_class: type[PrefillWorker] | type[DecodeWorker]
    world: World
    engine: SimEngine
    transfers: SimTransfers

    def __init__(
        self,
        world: World,
        instance_id: InstanceId,
        limits: InstanceLimits,
        make_policy: Callable[[], Policy],
        enable_prefix_caching: bool = False,
    ) -> None:
        super().__init__(world, instance_id)
        self._limits = limits
        self._make_policy = make_policy
        self._enable_prefix_caching = enable_prefix_caching

    @property
    @abstractmethod
    def _channels(self) -> SimChannels: ...

    @property
    def _ports(self) -> Ports:
        return self.world.host.ports[self.instance_id]

    # ---- life -------------------------------------------------------------------------------------------------------

    def begin(self) -> Messenger:
        world = self.world
        seconds = partial(world.overhead.engine_s, dice=world.dice)
        make = SimEngine if world.is_checked else TrustingEngine
        self.engine = make(self._limits, world.cost, world.computed, world.kv, seconds)
        self._messenger = Messenger(self._post, lambda action: action(), lambda: self._link)
        self._loop = WorkerLoop(
            self._begin_role(), world.segments.__getitem__, self._say, self._take_role, self._is_over
        )
        self._is_busy = self._is_woken = False
        self._patience: SimTimer | None = None
        return self._messenger

    @property
    def worker(self) -> Worker:
        return self._loop.worker

    def _begin_role(self) -> Worker:
        """Makes a worker of its role."""
        world, ids = self.world, TransferIds(self.epoch)
        make = SimTransfers if world.is_checked else TrustingTransfers
        self.transfers = make(world, ids, self.engine, self._channels, self._wake, self.when_awake)
        world.transfers[self.instance_id] = self.transfers
        return self.worker_class(
            self.engine,
            self.transfers,
            self._make_policy(),
            Estimate(world.cost),
            self.local_clock.now,
            SimThreads(self.after),
            self._enable_prefix_caching,
            self.engine.memory,
        )

    def _take_role(self, role: str) -> tuple[Worker, Hello]:
        raise RuntimeError(f"{self.instance_id} is to become a {role} instance, but can't change its role")

    def kill(self) -> None:
        self.transfers.die()
        super().kill()

    def maps(self, segment: str) -> bool:
        return self.transfers.maps(segment)

    def hello(self) -> Hello:
        return self._hello_of(self.worker)

    def _hello_of(self, worker: Worker) -> Hello:
        return replace(self.make_hello(worker.limits), cost=self.world.cost)

    def _is_over(self) -> bool:
        return self.world.router.has_left(self)

    # ---- iterations -------------------------------------------------------------------------------------------------

    def _post(self, item: AnyMessage | Up | Down) -> None:
        self._loop.post(item)
        self._wake()

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            if not self._is_busy:
                self.after(self.world.overhead.outside_s, self._begin)

    def _begin(self) -> None:
        self._is_woken, self._is_busy = False, True
        if self._patience:
            self._patience.cancel()
        step = self._loop.begin()
        if self.world.is_checked:
            self.worker.check()
        if step.iteration is None:
            self._finish(step)
        else:
            self.after(step.iteration.seconds, partial(self._finish, step))

    def _finish(self, step: Step) -> None:
        goes_on = self._loop.finish(step)
        self._is_busy = False
        if goes_on or self._is_woken:
            self._is_woken = True
            self.after(self.world.overhead.outside_s, self._begin)
        elif self.worker.patience_s is not None:
            self._patience = self.after(self.worker.patience_s, self._wake)

    def _say(self, connection: int, messages: list[AnyMessage]) -> None:
        self._messenger.say(connection, messages)

    # ---- checks -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks what holds at any time."""
        self.worker.check()

    def check_idle(self) -> None:
        """Raises RuntimeError if anything is left of a request."""
        self.worker.check_idle()
        self.engine.check_idle()


class SimPrefill(SimInstance):
    role = "prefill"
    worker_class: type[PrefillWorker] | type[DecodeWorker] = PrefillWorker

    def __init__(
        self,
        world: World,
        instance_id: InstanceId,
        limits: InstanceLimits,
        make_policy: Callable[[], Policy],
        staging_share: float,
        enable_prefix_caching: bool = False,
    ) -> None:
        super().__init__(world, instance_id, limits, make_policy, enable_prefix_caching)
        self._staging_share = staging_share

    @property
    def _channels(self) -> SimChannels:
        channels = self.world.cost.channels
        return SimChannels(
            load=channels.stage,
            save=channels.save,
            pull=channels.admit,
            ports=self._ports,
            staging_share=self._staging_share,
        )


class SimDecode(SimInstance):
    role = "decode"
    worker_class = DecodeWorker

    @property
    def _channels(self) -> SimChannels:
        return _of_decode(self.world, self._ports)


class SimColocated(SimDecode):
    role = "colocated"
    worker_class = ColocatedWorker


class SimChanging(SimPrefill):
    """A prefill or a decode instance, as the router orders. After a start, it has its first role."""

    def __init__(
        self,
        world: World,
        instance_id: InstanceId,
        limits: InstanceLimits,
        make_policy: Callable[[], Policy],
        staging_share: float,
        enable_prefix_caching: bool,
        first_role: str,
    ) -> None:
        super().__init__(world, instance_id, limits, make_policy, staging_share, enable_prefix_caching)
        self._first_role = self.role = first_role
        # The connection on which the Hello of its new role is still to be sent.
        self._changing_on: int | None = None

    def begin(self) -> Messenger:
        self._changing_on = None
        self._enter(self._first_role)
        return super().begin()

    def _enter(self, role: str) -> None:
        self.role, self.worker_class = role, PrefillWorker if role == PREFILL else DecodeWorker

    @property
    def _channels(self) -> SimChannels:
        return super()._channels if self.role == PREFILL else _of_decode(self.world, self._ports)

    def _take_role(self, role: str) -> tuple[Worker, Hello]:
        self.engine.check_idle()
        self._enter(role)
        self.epoch = self.world.next_epoch()
        worker = self._begin_role()
        return worker, self._hello_of(worker)

    def _say_hello(self, connection: int) -> None:
        """Sends Hello, unless that connection is gone: it then sends Hello on the next one."""
        if connection == self._changing_on:
            self._changing_on = None
        super()._say(connection, [self.hello()])

    def _say(self, connection: int, messages: list[AnyMessage]) -> None:
        if isinstance(messages[0], Hello):
            self._changing_on = connection
            self.after(ROLE_CHANGE_S, partial(self._say_hello, connection))
        elif connection != self._changing_on:
            super()._say(connection, messages)


def _of_decode(world: World, ports: Ports) -> SimChannels:
    """Returns the channels of a decode instance's copies."""
    channels = world.cost.channels
    return SimChannels(channels.fetch, channels.save, channels.admit, ports)
