"""What an instance's process has to be told. Plain values, no torch: the launcher makes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.engine.config import EngineConfig
from alignedserve.process.logs import LogConfig
from alignedserve.protocol.address import RouterAddress
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.types import InstanceId

NO_PROFILE = "none"


@dataclass(frozen=True)
class TransferConfig:
    # how KV gets to decode instances, one of TRANSPORTS: through the pool's memory, or from where it is staged
    transport: str = "host"
    # the share of a prefill instance's blocks for KV that is staged there; unused where the transport is host
    staging_share: float = 0.5
    # a copy that takes longer is given up
    timeout_s: float = 30.0
    # A copy of less than that is made at once, by the thread that computes. On a CPU whose cores are all computing,
    # another thread would wait for one of them longer than such a copy takes.
    quick_bytes: int = 0

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
    # file of the cost model's profile, or NO_PROFILE; None: where profiles are kept
    cost_profile: str | None = None

    @property
    def needs_profile(self) -> bool:
        return self.cost_profile != NO_PROFILE
