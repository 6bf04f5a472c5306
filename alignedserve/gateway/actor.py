"""The Ray actor of a gateway. The launcher does not import what it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

if TYPE_CHECKING:
    from alignedserve.gateway.config import GatewayConfig


@ray.remote
class GatewayActor:
    def __init__(self, config: GatewayConfig) -> None:
        self._config = config

    def prepare(self) -> None:
        """Imports what `run` needs."""
        import alignedserve.gateway.process  # noqa: F401

    def run(self) -> None:
        from alignedserve.gateway.process import GatewayProcess

        GatewayProcess(self._config).run()
