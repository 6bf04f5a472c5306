"""A whole system in virtual time: clients, gateways, their store, and islands with their routers, pools and instances.

It is the machinery only. What happens when, and what goes wrong, is a driver's: it starts, kills and hangs gateways,
routers and instances, sets the faults of the network and the store, and sends clients.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any

from alignedserve.batch.config import BatchConfig
from alignedserve.engine.config import EngineConfig
from alignedserve.gateway.config import GatewayConfig
from alignedserve.gateway.limits import Limits
from alignedserve.lengths.config import NONE, LengthConfig
from alignedserve.protocol.address import RouterAddress
from alignedserve.router.router import Router
from alignedserve.sim.clock import Clock
from alignedserve.sim.island import Island, IslandConfig
from alignedserve.store import StoreLimits
from alignedserve.types import Epoch, InstanceId
from alignedserve.vopr.front_end.clients import Clients
from alignedserve.vopr.front_end.history import History
from alignedserve.vopr.front_end.ledger import Ledger
from alignedserve.vopr.front_end.live_router import LiveRouter
from alignedserve.vopr.front_end.memory_store import MemoryStore
from alignedserve.vopr.front_end.store_link import StoreFaults, link_to
from alignedserve.vopr.front_end.virtual_gateway import VirtualGateway
from alignedserve.vopr.front_end.virtual_host import hosted, true_time
from alignedserve.vopr.front_end.virtual_loop import VirtualLoop
from alignedserve.vopr.front_end.words import NAME, served_model

TOKEN = "secret"


@dataclass(frozen=True)
class FrontConfig:
    # Its gateways are none: those here are real.
    island: IslandConfig
    num_islands: int = 1
    num_gateways: int = 2
    batches: BatchConfig = field(default_factory=BatchConfig)
    store: StoreLimits = field(default_factory=StoreLimits)
    limits: Limits = field(default_factory=lambda: Limits(max_stored_bytes=1 << 30))


class Front:
    def __init__(self, config: FrontConfig, seed: int, keeps_lines: bool = False) -> None:
        self.config = config
        self.clock = Clock()
        self.history = History(self.clock, keeps_lines)
        self.loop = VirtualLoop(self.clock, self.history)
        self.random = Random(seed)
        self.ledger = Ledger()
        self.store = MemoryStore(lambda: true_time(self.clock), config.store)
        self.store_faults = StoreFaults(observe=self.ledger.observe)
        self.islands = [self._island(number) for number in range(config.num_islands)]
        self.gateways = [self._gateway(name) for name in self._gateway_names()]
        self.clients = Clients(self.gateways, Random(seed + 1), self.history.add)

    def run(self, drive: Callable[[Front], Coroutine[Any, Any, None]]) -> str:
        """Starts everything, and runs until the driver ends. Returns the digest of all that happened. Raises what the
        driver raises, and an ExceptionGroup of the errors that nobody awaited."""
        with hosted(self.clock, Random(self.random.random())):
            self.loop.run(self._main(drive))
        errors = [each.get("exception") or RuntimeError(each["message"]) for each in self.loop.errors]
        if errors:
            raise ExceptionGroup("errors in callbacks and tasks", errors)
        return self.history.digest

    async def _main(self, drive: Callable[[Front], Coroutine[Any, Any, None]]) -> None:
        for island in self.islands:
            island.start()
        for gateway in self.gateways:
            gateway.start()
        await drive(self)

    @property
    def max_model_len(self) -> int:
        return self.config.island.decode.max_model_len

    # ---- what holds ----

    def check(self) -> None:
        """Holds at any time."""
        for island in self.islands:
            island.check()

    def check_idle(self) -> None:
        """Holds when no client waits, everything is up, and all messages and copies have arrived."""
        for island in self.islands:
            island.check_idle()
        self.ledger.check_idle()
        if num_open := sum(gateway.num_open for gateway in self.gateways):
            raise RuntimeError(f"no client waits, and {num_open} requests are open")

    # ---- what there is ----

    def _gateway_names(self) -> list[InstanceId]:
        return [InstanceId(f"gateway-{number}") for number in range(self.config.num_gateways)]

    def _address(self, number: int) -> RouterAddress:
        return RouterAddress(f"island-{number}", 1, TOKEN)

    def _island(self, number: int) -> Island:
        config = self.config.island
        island = Island(config, clock=self.clock)
        expected = {process.instance_id: process.role for process in island.processes}
        expected |= dict.fromkeys(self._gateway_names(), "gateway")

        def make_core(epoch: Epoch) -> Router:
            return Router(config.router, epoch, config.scheduling)

        router: Any = LiveRouter(self.loop, island.world, self._address(number), make_core, expected)
        island.router = island.world.router = router
        return island

    def _gateway(self, name: InstanceId) -> VirtualGateway:
        config = GatewayConfig(
            name,
            tuple(self._address(number) for number in range(self.config.num_islands)),
            EngineConfig(NAME, seed=self.random.randrange(1 << 30)),
            NAME,
            limits=self.config.limits,
            batches=self.config.batches,
            # Lengths are predicted in a thread, with patience by the clock: there is none of both here.
            lengths=LengthConfig(NONE),
            store_url="memory",
        )
        model = served_model(self.max_model_len)
        return VirtualGateway(
            self.loop,
            config,
            model,
            lambda name: link_to(self.store, self.store_faults, self.history, name),
        )
