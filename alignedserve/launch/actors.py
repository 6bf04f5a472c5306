"""The processes under Ray, and the nodes that they run on."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from alignedserve.instance.config import InstanceConfig
from alignedserve.launch.exits import ExitWatch
from alignedserve.launch.nodes import ISLAND, ROUTER_HOLDS
from alignedserve.launch.plan import ProcessSpec
from alignedserve.launch.role_actors import (
    ChangingActor,
    ColocatedActor,
    DecodeActor,
    GatewayActor,
    PoolActor,
    PrefillActor,
    RouterActor,
)
from alignedserve.types import next_generation

ACTORS: dict[str, Any] = {
    "router": RouterActor,
    "kvpool": PoolActor,
    "prefill": PrefillActor,
    "decode": DecodeActor,
    "colocated": ColocatedActor,
    "gateway": GatewayActor,
}


def _shell(spec: ProcessSpec) -> Any:
    may_change = isinstance(spec.config, InstanceConfig) and spec.config.first_role
    return ChangingActor if may_change else ACTORS[spec.role]


class RayActor:
    """A process under Ray. Ray starts it again whenever it dies."""

    def __init__(self, spec: ProcessSpec, node_id: str | None) -> None:
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": spec.num_gpus, "max_restarts": -1}
        if spec.holds_node:
            options["resources"] = {ISLAND: ROUTER_HOLDS}
        if node_id is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
        self.spec = spec
        self._node_id = node_id
        self._handle = _shell(spec).options(**options).remote(spec.config)
        # the last call of `run`, and the same call as long as nothing awaits it
        self._last: Any = None
        self._begun: Any = None
        # watches the process, if it runs on this host
        self._exit: ExitWatch | None = None

    def successor(self) -> RayActor | None:
        """Returns another actor, which can take this one's place; None if both would need the same GPU."""
        if self.spec.num_gpus:
            return None
        return RayActor(_next_generation(self.spec), self._node_id)

    async def prepare(self) -> None:
        """Returns when the process has imported and loaded what it can before it serves. Raises RayError."""
        await self._watch()
        await self._handle.prepare.remote()

    def begin(self) -> None:
        """Calls `run` of the process, without waiting for its end."""
        self._last = self._begun = self._handle.run.remote()

    async def ready(self) -> None:
        # Another call would wait for the end of `run`.
        if self._begun is None:
            await self._watch()

    async def run(self) -> None:
        if self._begun is None:
            self.begin()
        begun, self._begun = self._begun, None
        await begun

    async def until_ended(self) -> None:
        """Returns when the last run has ended, with or without an error; at once if there was none."""
        with contextlib.suppress(RayError):
            if self._last is not None:
                await self._last

    async def why_ended(self) -> str | None:
        """Returns how its last process ended; None if that is not known."""
        return await asyncio.to_thread(self._exit.result) if self._exit else None

    async def _watch(self) -> None:
        """Returns when the process exists. Raises RayError."""
        if self._exit:
            self._exit.close()
            self._exit = None
        pid: int = await self._handle.__ray_call__.remote(lambda actor: os.getpid())
        if self._node_id in (None, ray.get_runtime_context().get_node_id()):
            self._exit = ExitWatch(pid)

    def restart(self) -> None:
        ray.kill(self._handle, no_restart=False)

    def kill(self) -> None:
        """Kills the process for good. Safe to repeat."""
        ray.kill(self._handle, no_restart=True)
        # A thread that asks for its end keeps the descriptor open meanwhile.
        self._exit = None


def _next_generation(spec: ProcessSpec) -> ProcessSpec:
    """Returns the spec of a successor. A gateway needs another name, because it runs beside its predecessor."""
    if spec.role != "gateway":
        return spec
    name = next_generation(spec.instance_id)
    return replace(spec, instance_id=name, config=replace(spec.config, instance_id=name))
