"""The configuration of an instance's process. It has only plain values and needs no torch, because the launcher creates
it."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.engine.config import EngineConfig
from alignedserve.process.logs import LogConfig
from alignedserve.protocol.address import RouterAddress
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.types import InstanceId

NO_PROFILE = "none"
# Size in bytes up to which a copy on a CPU runs on the thread that computes. It takes about 0.2 ms at most.
QUICK_BYTES = 1 << 20


@dataclass(frozen=True)
class TransferConfig:
    # How KV gets to decode instances, one of TRANSPORTS: through the pool's memory (host), or directly from the prefill
    # instance that staged it.
    transport: str = "host"
    # Share of a prefill instance's blocks for staged KV. Unused with transport host.
    staging_share: float = 0.5
    # Timeout of a copy, in seconds.
    timeout_s: float = 30.0
    # Copies of fewer bytes run on the thread that computes. On a busy CPU, another thread would wait for a core longer
    # than such a copy takes.
    quick_bytes: int = 0
    # The format of KV in the pool, a key of POOL_KV_DTYPES.
    pool_kv_dtype: str = "auto"
    # The share of the blocks loaded from the pool that are compared with their checksums. 0: nothing has checksums.
    verify_blocks: float = 0.0

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
    # The file of the cost model's profile, or NO_PROFILE; None means the default path.
    cost_profile: str | None = None
    # The first role, if it can change between prefill and decode; None: the role of its process.
    first_role: str | None = None

    @property
    def needs_profile(self) -> bool:
        return self.cost_profile != NO_PROFILE
