"""What an instance's process has to be told. Plain values, no torch: the launcher makes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.config import EngineConfig
from alignedserve.logs import LogConfig
from alignedserve.types import InstanceId
from alignedserve.wire import RouterAddress


@dataclass(frozen=True)
class TransferConfig:
    # how KV gets to decode instances, one of transport's LINKS: through the pool's memory, or from where it is staged
    link: str = "host"
    # of a prefill instance's blocks, for KV that is staged there; unused where the link is the pool's memory
    staging_share: float = 0.5
    # a copy that takes longer is given up
    timeout_s: float = 30.0

    @property
    def is_staged(self) -> bool:
        return self.link != "host"


@dataclass(frozen=True)
class InstanceConfig:
    instance_id: InstanceId
    router: RouterAddress
    engine: EngineConfig
    transfers: TransferConfig = TransferConfig()
    log: LogConfig = field(default_factory=LogConfig)
