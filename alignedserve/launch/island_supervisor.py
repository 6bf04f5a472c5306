"""Supervises the processes of one island. The island's router reports which of them are up."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from alignedserve.launch.actors import RayActor
from alignedserve.launch.console import Alarm
from alignedserve.launch.control import Say
from alignedserve.launch.gateway_links import GatewayLinks
from alignedserve.launch.plan import IslandPlan, ProcessSpec
from alignedserve.launch.process_supervisor import ProcessFailed, ProcessSupervisor
from alignedserve.protocol.connection import RouterConnection, new_epoch
from alignedserve.protocol.messages import (
    AdaptersSet,
    AnyMessage,
    Cluster,
    Hello,
    InstanceLimits,
    Load,
    ProcessStatus,
    SetAdapters,
    Stop,
    Welcome,
)
from alignedserve.types import LAUNCHER, InstanceId

# seconds that processes get to stop by themselves
STOP_S = 5.0
# the roles in the order in which a restart replaces them, and the pause in seconds between two processes
RESTARTED = ("prefill", "decode", "colocated", "kvpool", "router")
PAUSE_S = 2.0


class IslandSupervisor:
    def __init__(
        self,
        plan: IslandPlan,
        name_of: Callable[[ProcessSpec], str],
        say: Callable[[str], None],
        links: GatewayLinks,
    ) -> None:
        """`links` are the links to gateways, because this host may have one. They have the adapters, too."""
        self.plan = plan
        self.name = plan.node.name
        self._say = say
        self._links = links
        self.gateway: ProcessSupervisor | None = None
        if spec := plan.gateway:
            actor = RayActor(spec, plan.node.node_id)
            self.gateway = ProcessSupervisor(f"{self.name}/gateway", actor, say)
            links.add(spec.instance_id, self.gateway)
        self._supervisors = {
            spec.instance_id: ProcessSupervisor(name_of(spec), RayActor(spec, plan.node.node_id), say)
            for spec in plan.processes
        }
        self._router = self._supervisors[InstanceId("router")]
        self._connection = RouterConnection(plan.router, self._hello, self)
        self._epoch = new_epoch()
        # the router's last report, while it is connected
        self._load: Load | None = None

    async def supervise(self) -> None:
        """Runs until `stop`. Raises ProcessFailed, in a group."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._connection.run())
            if self.gateway:
                group.create_task(self._keep(self.gateway))
            for supervisor in self._supervisors.values():
                group.create_task(supervisor.supervise())

    async def _keep(self, gateway: ProcessSupervisor) -> None:
        """Supervises the gateway. If it fails, the island goes on, because there are other gateways."""
        try:
            await gateway.supervise()
        except ProcessFailed as failed:
            self._say(Alarm(f"{failed}; {self.name} has no gateway"))

    @property
    def is_up(self) -> bool:
        return all(supervisor.is_up for supervisor in self._supervisors.values())

    @property
    def busy(self) -> float:
        """The share of the time that instances of the busiest role compute."""
        return self._load.busy if self._load else 0.0

    @property
    def is_empty(self) -> bool:
        return self._load is not None and not self._load.num_requests

    def set_adapters(self, order: SetAdapters) -> None:
        self._connection.send(order)

    def stop(self) -> None:
        """Orders the router, and through it the other processes, to stop."""
        for supervisor in self._all:
            supervisor.stopping()
        self._connection.send(Stop())

    def abandon(self) -> None:
        """Ends what is left of an island after it failed or its node was lost."""
        for supervisor in self._all:
            supervisor.stopping()
        if spec := self.plan.gateway:
            self._links.remove(spec.instance_id)
        self._connection.stop()
        for supervisor in self._all:
            supervisor.actor.kill()

    @property
    def _all(self) -> list[ProcessSupervisor]:
        return [*self._supervisors.values(), *([self.gateway] if self.gateway else [])]

    async def restart(self, say: Say) -> None:
        """Replaces one process after the other. Raises RestartFailed."""
        for spec in sorted(self.plan.processes, key=lambda spec: RESTARTED.index(spec.role)):
            supervisor = self._supervisors[spec.instance_id]
            begun_s = time.monotonic()
            await supervisor.replace()
            say(f"{supervisor.name} replaced in {time.monotonic() - begun_s:.1f} s")
            await asyncio.sleep(PAUSE_S)

    # ---- the connection's handler ----

    def on_up(self, welcome: Welcome) -> None:
        if (adapters := self._links.adapters) and (order := adapters.order):
            adapters.routers.present.add(self.name)
            self._connection.send(order)
        self._router.seen(self.name, f"epoch {welcome.router_epoch}, at {self.plan.router}")

    def on_down(self) -> None:
        self._load = None
        if self._links.adapters:
            self._links.adapters.lost(self.name)
        self._router.unseen(self.name, is_dead=True)
        for supervisor in self._supervisors.values():
            supervisor.unseen(self.name, is_dead=False)

    def on_message(self, message: AnyMessage) -> None:
        if isinstance(message, Load):
            self._load = message
        elif isinstance(message, AdaptersSet) and self._links.adapters:
            self._links.adapters.obeyed(self.name, message)
        elif isinstance(message, Cluster):
            here = {process.instance_id: process for process in message.processes if process.state == "up"}
            for name, supervisor in self._supervisors.items():
                if process := here.get(name):
                    supervisor.seen(self.name, _detail(process))
                else:
                    supervisor.unseen(self.name, is_dead=True)

    def _hello(self) -> Hello:
        return Hello("launcher", LAUNCHER, self._epoch, os.getpid(), {}, InstanceLimits())


def _detail(process: ProcessStatus) -> str:
    if process.role == "router":
        return f"epoch {process.epoch}"
    blocks = f", {process.num_blocks} blocks" if process.num_blocks else ""
    return f"pid {process.pid}{blocks}"
