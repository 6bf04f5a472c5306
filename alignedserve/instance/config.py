"""The configuration of an instance's process. It has plain values only and needs no torch, since the launcher makes
it."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.engine.config import EngineConfig
from alignedserve.process.logs import LogConfig
from alignedserve.protocol.address import RouterAddress
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.types import InstanceId

NO_PROFILE = "none"
# The bytes up to which a copy on a CPU is made by the thread that computes, since it takes no more than about 0.2 ms.
QUICK_BYTES = 1 << 20


@dataclass(frozen=True)
class TransferConfig:
    # How KV gets to decode instances, one of TRANSPORTS: through the pool's memory (host), or straight from the
    # prefill instance which has staged it.
    transport: str = "host"
    # The share of a prefill instance's blocks that is for staged KV; unused where the transport is host.
    staging_share: float = 0.5
    # A copy that takes longer fails.
    timeout_s: float = 30.0
    # The thread that computes makes copies of fewer bytes itself, at once. On a CPU whose cores are all computing,
    # another thread would wait for a core longer than such a copy takes.
    quick_bytes: int = 0
    # A key of POOL_KV_DTYPES: how KV is kept in the pool.
    pool_kv_dtype: str = "auto"

    @property
    def is_staged(self) -> bool:
        return self.transport != "host"


@dataclass(frozen=True)
class InstanceConfig:
    instance_id: InstanceId
    router: RouterAddress
    engine: EngineConfig
    transfers: TransferConfig = TransferConfig()
    log: LogConfig = field(default_factory=LogConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    # The file of the cost model's profile, or NO_PROFILE; None for the default path.
    cost_profile: str | None = None
    # The role in which it starts, if it may change between prefill and decode; None: it has the role of its process.
    first_role: str | None = None

    @property
    def needs_profile(self) -> bool:
        return self.cost_profile != NO_PROFILE
