"""A whole island in virtual time: one router, one pool, instances, gateways, and clients that submit a workload."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from alignedserve.kvpool.pool import PoolConfig
from alignedserve.protocol.messages import DECODE, PREFILL, InstanceLimits, Request
from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import Policy, make_policy
from alignedserve.sim.clock import Clock
from alignedserve.sim.foresight import Foresee, nothing
from alignedserve.sim.gateway import SimGateway, Stream
from alignedserve.sim.host import Latency
from alignedserve.sim.host_links import HostLinks, Sharing
from alignedserve.sim.instance import SimChanging, SimColocated, SimDecode, SimInstance, SimPrefill
from alignedserve.sim.pool import SimPool
from alignedserve.sim.process import SimProcess
from alignedserve.sim.router import SimRouter
from alignedserve.sim.world import NO_OVERHEAD, Overhead, World
from alignedserve.timing.cost import CostModel
from alignedserve.types import InstanceId


@dataclass(frozen=True)
class IslandSettings:
    """All of an island's configuration but sizes of memory and of steps."""

    cost: CostModel
    router: RouterConfig = field(default_factory=lambda: RouterConfig(link="host"))
    num_prefill: int = 1
    num_decode: int = 1
    # Colocated instances, in place of the prefill and decode instances.
    num_colocated: int = 0
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    # Which copies share bandwidth.
    sharing: Sharing = field(default_factory=Sharing)
    # Returns the output length that gateways predict for a request.
    foresee: Foresee = nothing
    overhead: Overhead = NO_OVERHEAD
    # Whether prompts are distinguished by their tokens, so that equal prefixes share KV.
    enable_prefix_caching: bool = False
    # See World. May be False if only figures are needed.
    is_checked: bool = True


@dataclass(frozen=True, kw_only=True)
class IslandConfig(IslandSettings):
    prefill: InstanceLimits
    decode: InstanceLimits
    # Whole columns.
    pool_blocks: int
    num_gateways: int = 1
    # The share of a prefill instance's blocks that is kept for candidates. With the link "host" none are staged.
    staging_share: float = 0.5
    # See PoolConfig.
    promised_share: float = PoolConfig.promised_share
    # See World.
    check_share: float = 1.0

    def ids_of(self, role: str) -> list[InstanceId]:
        counts = {"prefill": self.num_prefill, "decode": self.num_decode}
        if self.num_colocated:
            counts = {"colocated": self.num_colocated}
        return [InstanceId(f"{role}-{index}") for index in range(counts.get(role, 0))]

    @property
    def instance_ids(self) -> list[InstanceId]:
        return [each for role in ("prefill", "decode", "colocated") for each in self.ids_of(role)]


class SimIsland:
    def __init__(
        self, config: IslandConfig, latency: Latency | None = None, clock: Clock | None = None
    ) -> None:
        """`latency`: latency of messages, if not that of the overhead. `clock`: the clock, if islands share one."""
        self.config = config
        self.host = HostLinks(config.cost, config.sharing, config.instance_ids)
        clock = clock or Clock()
        latency = latency or (lambda: config.overhead.message_s)
        self.world = World(
            config.cost,
            latency,
            self.host,
            foresee=config.foresee,
            clock=clock,
            overhead=config.overhead,
            is_checked=config.is_checked,
            check_share=config.check_share,
        )
        self.router = self.world.router = SimRouter(self.world, config.router, config.scheduling)
        pool = PoolConfig(span=config.decode.decode_span, promised_share=config.promised_share)
        limits = pool.limits(config.pool_blocks, config.decode.block_size)
        self.pool = SimPool(self.world, InstanceId("kvpool-0"), limits, pool)
        self.prefills = [self._prefill(each) for each in config.ids_of("prefill")]
        self.decodes = [self._decode(each) for each in config.ids_of("decode")]
        self.colocated = [self._colocated(each) for each in config.ids_of("colocated")]
        self.gateways = [
            SimGateway(self.world, InstanceId(f"gateway-{index}"), config.decode.max_model_len)
            for index in range(config.num_gateways)
        ]
        for process in self.processes:
            self.world.processes[process.instance_id] = process

    def _prefill(self, name: InstanceId) -> SimInstance:
        config = self.config
        if role := config.router.first_role(PREFILL):
            return self._changing(name, config.prefill, role)
        caching = config.enable_prefix_caching
        return SimPrefill(self.world, name, config.prefill, self._policy, self._staging_share, caching)

    def _decode(self, name: InstanceId) -> SimInstance:
        if role := self.config.router.first_role(DECODE):
            return self._changing(name, self.config.decode, role)
        caching = self.config.enable_prefix_caching
        return SimDecode(self.world, name, self.config.decode, self._policy, caching)

    def _changing(self, name: InstanceId, limits: InstanceLimits, role: str) -> SimChanging:
        caching = self.config.enable_prefix_caching
        return SimChanging(self.world, name, limits, self._policy, self._staging_share, caching, role)

    @property
    def _staging_share(self) -> float:
        return 0.0 if self.config.router.link == "host" else self.config.staging_share

    def _colocated(self, name: InstanceId) -> SimColocated:
        config = self.config
        return SimColocated(self.world, name, config.decode, self._policy, config.enable_prefix_caching)

    def _policy(self) -> Policy:
        return make_policy(self.config.scheduling)

    @property
    def processes(self) -> list[SimProcess]:
        return [self.pool, *self.instances, *self.gateways]

    @property
    def instances(self) -> list[SimInstance]:
        return [*self.prefills, *self.decodes, *self.colocated]

    @property
    def now(self) -> float:
        return self.world.clock.now

    @property
    def streams(self) -> list[Stream]:
        return [stream for gateway in self.gateways for stream in gateway.streams.values()]

    @property
    def num_open(self) -> int:
        return sum(len(gateway.open) for gateway in self.gateways)

    def start(self) -> None:
        self.router.start()
        for process in self.processes:
            process.start()

    def submit(self, requests: Iterable[Request]) -> None:
        """Submits each request when it arrives, to the gateways in turn."""
        for index, request in enumerate(requests):
            gateway = self.gateways[index % len(self.gateways)]
            self.world.clock.at(request.arrival_s, partial(gateway.submit, request))

    def run(self, seconds: float) -> None:
        self.world.clock.run_until(self.now + seconds)

    def run_until_done(self, num_requests: int, limit_s: float) -> bool:
        """Runs until this many requests were submitted and none is open. Returns False if that takes longer than the
        limit."""

        def goes_on() -> bool:
            return self.num_open > 0 or sum(len(gateway.streams) for gateway in self.gateways) < num_requests

        return self.world.clock.run_while(goes_on, limit_s)

    def settle(self) -> None:
        """Runs until everything is over that has nothing left to wait for: messages, copies, orphans."""
        self.run(self.config.router.orphan_s + 2.0)

    def check(self) -> None:
        """Checks what holds at any time."""
        for instance in self.instances:
            instance.check()
        if self.pool.is_up:
            self.pool.core.check()

    def check_idle(self) -> None:
        """Checks what holds when nothing is open, everything is up, and all messages and copies have arrived."""
        for instance in self.instances:
            instance.check_idle()
        self.world.carrier.check_idle()
        if self.pool.is_up:
            self.pool.core.check_idle()
        if self.router.core:
            self.router.core.check_idle()
