"""A whole system in virtual time: clients, gateways, their store, and islands with their routers, pools and instances.

This is only the machinery. A driver decides what happens and when: it starts, kills and hangs gateways, routers and
instances, sets the faults of the network and the store, and sends clients.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from alignedserve.batch.config import BatchConfig
from alignedserve.engine.config import EngineConfig
from alignedserve.gateway.config import GatewayConfig
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.lengths.config import NONE, LengthConfig
from alignedserve.protocol.address import RouterAddress
from alignedserve.sim.clock import Clock
from alignedserve.sim.island import IslandConfig, SimIsland
from alignedserve.sim.process import SimProcess
from alignedserve.store import StoreLimits
from alignedserve.types import InstanceId
from alignedserve.vopr.chances import KeyedRandom
from alignedserve.vopr.checks import CountsAddUp
from alignedserve.vopr.failures import Broken
from alignedserve.vopr.front_end.calls import Calls
from alignedserve.vopr.front_end.clients import GatewayClients
from alignedserve.vopr.front_end.delivered import Delivered
from alignedserve.vopr.front_end.journal import Journal
from alignedserve.vopr.front_end.ledger import Ledger
from alignedserve.vopr.front_end.live_router import LiveRouter
from alignedserve.vopr.front_end.memory_store import MemoryStore
from alignedserve.vopr.front_end.quiet import FaultTimes
from alignedserve.vopr.front_end.store_link import StoreFaults, StoreObserver, link_to
from alignedserve.vopr.front_end.virtual_gateway import VirtualGateway
from alignedserve.vopr.front_end.virtual_host import hosted, true_time
from alignedserve.vopr.front_end.virtual_loop import VirtualLoop
from alignedserve.vopr.front_end.wanted import AwaitedAnswers, Lines
from alignedserve.vopr.front_end.words import NAME, served_model
from alignedserve.vopr.history import ROUTER
from alignedserve.vopr.launcher import LaunchedProcess

TOKEN = "secret"
# The distance between the epochs of two islands' routers, so that they never meet.
NUM_EPOCHS = 1_000_000


@dataclass(frozen=True)
class FrontConfig:
    # Without gateways: those here are real.
    island: IslandConfig
    num_islands: int = 1
    num_gateways: int = 2
    batches: BatchConfig = field(default_factory=BatchConfig)
    store: StoreLimits = field(default_factory=StoreLimits)
    limits: CallLimits = field(default_factory=lambda: CallLimits(max_stored_bytes=1 << 30))


class Front:
    def __init__(
        self,
        config: FrontConfig,
        seed: int,
        clock: Clock,
        store_faults: StoreFaults,
        keeps_lines: bool = False,
    ) -> None:
        self.config = config
        self.clock = clock
        self.journal = Journal(self.clock, keeps_lines)
        self.loop = VirtualLoop(clock, self.journal)
        self.quiet = FaultTimes(self.clock)
        self.ledger = Ledger(self.clock, self.quiet)
        self.wanted = AwaitedAnswers(self.clock, self.quiet)
        self.lines, self.delivered = Lines(self.wanted), Delivered(self.clock)
        self.store = MemoryStore(lambda: true_time(self.clock), config.store)
        self.store_observers: list[StoreObserver] = [self.ledger, self.lines]
        self._store_faults = store_faults
        self._seed = seed
        self.islands = [self._island(number) for number in range(config.num_islands)]
        self.routers: list[LiveRouter] = [self._router(*each) for each in enumerate(self.islands)]
        self._model = served_model(self.max_model_len)
        self.gateways = [self._gateway(name) for name in self._gateway_names()]
        self.clients = self._clients()

    def run(self, drive: Callable[[Front], Coroutine[Any, Any, None]]) -> str:
        """Starts everything, and runs until the driver ends. Returns the digest of all events. Raises errors of the
        driver, and errors that were never awaited."""
        with hosted(self.clock, self._seed):
            self.loop.run(self._main(drive))
        self._raise_errors()
        return self.journal.digest

    @property
    def processes(self) -> dict[InstanceId, LaunchedProcess]:
        """All processes that can die, by their names in histories."""
        found: dict[InstanceId, LaunchedProcess] = {}
        for name, island, router in zip(self.island_names, self.islands, self.routers, strict=True):
            found[InstanceId(f"{name}/{ROUTER}")] = router
            for process in island.processes:
                found[InstanceId(f"{name}/{process.instance_id}")] = process
        return found | {gateway.name: gateway for gateway in self.gateways}

    @property
    def island_names(self) -> list[str]:
        return [self._address(number).host for number in range(self.config.num_islands)]

    def regroup(self, islands: Iterable[int]) -> None:
        """Tells the gateways that these islands exist."""
        for gateway in self.gateways:
            gateway.set_islands({number: self._address(number) for number in islands})

    def on_fenced(self, fenced: Callable[[InstanceId], None]) -> None:
        """Sets what is called with each process that a router has killed."""
        for name, island in zip(self.island_names, self.islands, strict=True):
            island.world.fenced = partial(_tell, fenced, name)

    async def _main(self, drive: Callable[[Front], Coroutine[Any, Any, None]]) -> None:
        for island in self.islands:
            island.start()
        for gateway in self.gateways:
            gateway.start()
        await drive(self)

    @property
    def max_model_len(self) -> int:
        return self.config.island.decode.max_model_len

    # ---- checks ----

    def check(self) -> None:
        """Checks what holds at any time."""
        self._raise_errors()
        for island, router in zip(self.islands, self.routers, strict=True):
            CountsAddUp(island).check()
            if router.core:
                self.wanted.check(router.core.state.requests)

    def check_idle(self) -> None:
        """Checks what holds when no client waits, everything is up, and all messages and copies have arrived."""
        self.check()
        for island in self.islands:
            island.check_idle()
        self.ledger.check_idle()
        if num_open := sum(gateway.num_open for gateway in self.gateways):
            raise Broken(f"no client waits, and {num_open} requests are open")

    def _raise_errors(self) -> None:
        """Raises the first error that was never awaited."""
        for each in self.loop.errors:
            raise each.get("exception") or RuntimeError(each["message"])

    # ---- parts ----

    def _gateway_names(self) -> list[InstanceId]:
        return [InstanceId(f"gateway-{number}") for number in range(self.config.num_gateways)]

    def _address(self, number: int) -> RouterAddress:
        return RouterAddress(f"island-{number}", 1, TOKEN)

    def _island(self, number: int) -> SimIsland:
        island = SimIsland(self.config.island, clock=self.clock)
        island.world.num_epochs = number * NUM_EPOCHS
        return island

    def _router(self, number: int, island: SimIsland) -> LiveRouter:
        live = LiveRouter(
            self.loop, self._address(number), self._gateway_names(), island.world, self.config.island
        )
        live.observers += [self.lines, self.delivered]
        router: Any = live
        island.router = island.world.router = router
        return live

    def _gateway(self, name: InstanceId) -> VirtualGateway:
        config = GatewayConfig(
            name,
            tuple(self._address(number) for number in range(self.config.num_islands)),
            EngineConfig(NAME, seed=self._seed % (1 << 30)),
            NAME,
            limits=self.config.limits,
            batches=self.config.batches,
            # Lengths are predicted in a thread, with real-time patience; neither exists here.
            lengths=LengthConfig(NONE),
            store_url="memory",
        )
        return VirtualGateway(
            self.loop,
            config,
            self._model,
            lambda name: link_to(self.store, self._store_faults, self.store_observers, self.journal, name),
        )

    def _clients(self) -> GatewayClients:
        calls = Calls(self.gateways, KeyedRandom(self._seed), self.journal.add)
        return GatewayClients(
            self.loop, calls, self.wanted, self.delivered, lambda: self.quiet.num_troubles, self.max_model_len
        )


def _tell(fenced: Callable[[InstanceId], None], island: str, process: SimProcess) -> None:
    fenced(InstanceId(f"{island}/{process.instance_id}"))
