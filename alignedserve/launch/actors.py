"""The Ray shells of the roles, and how they are placed."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from alignedserve.decode_worker.actor import ColocatedActor, DecodeActor
from alignedserve.gateway.actor import GatewayActor
from alignedserve.kvpool.actor import PoolActor
from alignedserve.launch.plan import ProcessSpec
from alignedserve.prefill_worker.actor import PrefillActor
from alignedserve.router.actor import RouterActor

ACTORS: dict[str, Any] = {
    "router": RouterActor,
    "kvpool": PoolActor,
    "prefill": PrefillActor,
    "decode": DecodeActor,
    "colocated": ColocatedActor,
    "gateway": GatewayActor,
}


class RayActor:
    """A process under Ray, which starts it again whenever it dies."""

    def __init__(self, spec: ProcessSpec, node_id: str | None) -> None:
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": spec.num_gpus, "max_restarts": -1}
        if node_id is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
        self._handle = ACTORS[spec.role].options(**options).remote(spec.config)

    async def ready(self) -> None:
        await self._handle.__ray_ready__.remote()

    async def run(self) -> None:
        await self._handle.run.remote()

    def restart(self) -> None:
        ray.kill(self._handle, no_restart=False)

    def kill(self) -> None:
        """Kills the process for good. Safe to repeat."""
        ray.kill(self._handle, no_restart=True)
