"""What an instance's process has to be told. Plain values, no torch: the launcher makes them."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.config import EngineConfig
from alignedserve.types import InstanceId
from alignedserve.wire import RouterAddress


@dataclass(frozen=True)
class InstanceConfig:
    instance_id: InstanceId
    router: RouterAddress
    engine: EngineConfig
