"""Supervises the whole system: its islands, its gateways and its store, from the first actor to the last."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray

from alignedserve.gateway.config import KeyConfig
from alignedserve.launch.actors import RayActor
from alignedserve.launch.adapters import AdapterKeeper
from alignedserve.launch.api_keys import KeyFile
from alignedserve.launch.console import Alarm
from alignedserve.launch.control import Control, RestartFailed, Say
from alignedserve.launch.gateway_links import GatewayLinks
from alignedserve.launch.island_supervisor import STOP_S, IslandSupervisor
from alignedserve.launch.islands import NodeIslands, first_failure
from alignedserve.launch.nodes import Nodes
from alignedserve.launch.plan import IslandPlan, Node, ProcessSpec
from alignedserve.launch.process_supervisor import ProcessSupervisor
from alignedserve.launch.store import StoreLocation
from alignedserve.launch.store_supervisor import StoreSupervisor
from alignedserve.launch.upgrade import check_installed

# seconds after which a gateway that was told to retire, and has not ended by itself, is killed
RETIRED_S = 660.0


@dataclass(frozen=True)
class SystemPlan:
    # those of the first nodes
    islands: Sequence[IslandPlan]
    # makes those of later nodes
    island_of: Callable[[Node], IslandPlan]
    gateways: Sequence[ProcessSpec]
    store: StoreLocation
    # their file is watched
    keys: KeyConfig
    # the path of the Unix socket at which others may ask for a restart
    control_path: str
    # the socket at which gateways listen
    listener: socket.socket
    # adapters may be loaded from below these directories
    lora_modules_from: Sequence[str]
    # seconds that requests which run at the end get to finish
    shutdown_timeout_s: float


class SystemSupervisor:
    def __init__(
        self, plan: SystemPlan, nodes: Nodes, say: Callable[[str], None], ready: Callable[[], None]
    ) -> None:
        """`ready` is called when everything is up for the first time and every gateway accepts clients."""
        self._say = say
        self._ready = ready
        self._shutdown_timeout_s = plan.shutdown_timeout_s
        gateways = plan.gateways
        here = ray.get_runtime_context().get_node_id()
        self._gateways = {
            spec.instance_id: ProcessSupervisor(
                "gateway" if len(gateways) == 1 else spec.instance_id, RayActor(spec, here), say
            )
            for spec in gateways
        }
        links = self._links = GatewayLinks(nodes.launcher, self._gateways)
        owners = gateways[0].config.key_owners
        if owners:
            links.set_keys(owners)
        self._key_file = KeyFile(plan.keys, owners, say, links.set_keys)
        self._control = Control(plan.control_path, plan.listener, self._restart)
        self._restarting = asyncio.Lock()
        # gateways that were replaced, by the tasks that wait for their ends
        self._retiring: dict[asyncio.Task[None], RayActor] = {}
        self._store = StoreSupervisor(plan.store, say)

        def make(island: IslandPlan) -> IslandSupervisor:
            return IslandSupervisor(island, _naming(island, is_only=not nodes.may_change), say, links)

        self._islands = NodeIslands(
            nodes, plan.islands, plan.island_of, make, links.tell, say, links.attained
        )
        if nodes.launcher.path:
            links.adapters = AdapterKeeper(
                gateways[0].config.engine,
                plan.lora_modules_from,
                Path(nodes.launcher.path).parent / "adapters",
                self._islands.set_adapters,
                links.tell_all,
            )
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Runs until `stop`. Raises ProcessFailed if something can't be started, or started again."""
        await self._links.listen()
        await self._control.listen()
        try:
            await self._run()
        finally:
            self._links.close()
            await self._control.close()

    async def _run(self) -> None:
        supervising = asyncio.create_task(self._supervise())
        storing = asyncio.create_task(self._store.supervise())
        stopping = asyncio.create_task(self._stop.wait())
        watching = asyncio.create_task(self._key_file.watch())
        await asyncio.wait({supervising, storing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        # From here on new connections are refused if all gateways have ended.
        self._control.stop()
        for gateway in self._all_gateways:
            gateway.stopping()
        if any(gateway.is_up for gateway in self._gateways.values()) and not supervising.done():
            await self._drain(supervising)
        self._say("stopping")
        for task, actor in list(self._retiring.items()):
            task.cancel()
            actor.kill()
        watching.cancel()
        self._islands.stop()
        self._links.stop()
        await asyncio.wait({supervising}, timeout=STOP_S)
        supervising.cancel()
        await asyncio.wait({supervising})
        # The store stops last, because gateways release their jobs before.
        self._store.stop()
        await asyncio.wait({storing})
        for task in (supervising, storing):
            if not task.cancelled() and (error := task.exception()):
                raise first_failure(error)

    def stop(self) -> None:
        """Stops the system when running requests have finished; at once if it is called again."""
        self._hurry.set() if self._stop.is_set() else self._stop.set()

    async def _drain(self, supervising: asyncio.Task[None]) -> None:
        """Waits until the gateways have ended, time is up, `stop` was called again, or something has failed."""
        self._say(f"draining: up to {self._shutdown_timeout_s:g} s")
        self._links.drain()
        ended = asyncio.create_task(self._until_gateways_ended())
        hurried = asyncio.create_task(self._hurry.wait())
        await asyncio.wait(
            {ended, hurried, supervising},
            # Gateways end by themselves. The time-out is for a gateway that does not receive the order.
            timeout=self._shutdown_timeout_s + STOP_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        ended.cancel()
        hurried.cancel()

    # ---- a restart ----

    async def _restart(self, say: Say) -> None:
        if self._restarting.locked():
            raise RestartFailed("another restart is under way")

        def tell(line: str) -> None:
            """Prints the line and sends it to the process that asked, which may have exited."""
            self._say(f"restart: {line}")
            say(line)

        async with self._restarting:
            self._say("restart: every process is replaced, one after the other")
            try:
                await check_installed([("this host", None), *self._islands.hosts])
                await self._islands.restart(tell)
                for gateway in self._all_gateways:
                    await self._replace_gateway(gateway, tell)
            except RestartFailed as error:
                self._say(Alarm(f"restart: failed: {error}"))
                raise
            self._say("restart: done")

    async def _replace_gateway(self, gateway: ProcessSupervisor, say: Say) -> None:
        """Starts another gateway at the same socket. Once that accepts connections, the old one accepts no more, and
        ends when its own are closed. Raises RestartFailed."""
        begun_s, old, new = time.monotonic(), gateway.actor, await gateway.successor()
        assert isinstance(old, RayActor) and isinstance(new, RayActor), "gateways have no GPU"
        try:
            new.begin()
            await self._until_serving(gateway, new)
        except BaseException:
            new.kill()
            raise
        gateway.switch(new)
        self._links.retire(old.spec.instance_id)
        task = asyncio.create_task(self._until_retired(old))
        self._retiring[task] = old
        task.add_done_callback(lambda task: self._retiring.pop(task, None))
        say(f"{gateway.name} replaced in {time.monotonic() - begun_s:.1f} s")

    async def _until_serving(self, gateway: ProcessSupervisor, new: RayActor) -> None:
        """Returns when the gateway accepts clients. Raises RestartFailed if it ends before, or takes too long."""
        serving = asyncio.create_task(self._links.until_serving(new.spec.instance_id))
        ended = asyncio.create_task(new.until_ended())
        try:
            await asyncio.wait(
                {serving, ended}, timeout=gateway.patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not serving.done():
                raise RestartFailed(f"another process for {gateway.name} does not come up")
        finally:
            serving.cancel()
            ended.cancel()

    async def _until_retired(self, gateway: RayActor) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETIRED_S):
                await gateway.until_ended()
        gateway.kill()

    @property
    def _all_gateways(self) -> list[ProcessSupervisor]:
        return [*self._gateways.values(), *self._islands.gateways]

    # ---- its tasks ----

    async def _supervise(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._announce())
            for gateway in self._gateways.values():
                group.create_task(gateway.supervise())
            group.create_task(self._islands.supervise())

    async def _announce(self) -> None:
        gateways = (gateway.until_up() for gateway in self._gateways.values())
        await asyncio.gather(self._store.until_up(), self._islands.until_up(), *gateways)
        # An island goes on without its gateway if that fails.
        await asyncio.gather(*(gateway.until_up_or_ended() for gateway in self._islands.gateways))
        self._ready()

    async def _until_gateways_ended(self) -> None:
        await asyncio.gather(*(gateway.until_ended() for gateway in self._all_gateways))
        if self._retiring:
            await asyncio.wait(self._retiring)


def _naming(plan: IslandPlan, is_only: bool) -> Callable[[ProcessSpec], str]:
    return lambda spec: spec.instance_id if is_only else f"{plan.node.name}/{spec.instance_id}"
