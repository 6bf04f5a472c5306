"""The launcher: starts Ray, plans and supervises the system, until it is ordered to stop."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from contextlib import AbstractContextManager
from dataclasses import replace

from alignedserve.launch.config import LaunchConfig
from alignedserve.launch.control import Say, control_path
from alignedserve.launch.first_process import Orders
from alignedserve.launch.leftovers import Leftovers
from alignedserve.launch.nodes import Nodes, nodes_of, this_machine
from alignedserve.launch.plan import (
    IslandPlan,
    Node,
    check,
    check_quantised,
    plan_gateways,
    plan_island,
    plan_island_gateway,
)
from alignedserve.launch.ports import bound
from alignedserve.launch.settings import Settings
from alignedserve.launch.store import locate_store
from alignedserve.models.locate import locate_model
from alignedserve.process.private_files import make_directory
from alignedserve.store.homes import make_home
from alignedserve.version import __version__


def launch(settings: Settings, say: Say, orders: Orders, left: Leftovers, start_s: float) -> None:
    """Runs the system until an order ends it. Raises ValueError for settings that can't work, and ProcessFailed if a
    process can't be kept running. `left` removes what outlives this process. `start_s` is when `serve` began."""
    http, engine = settings.http, settings.engine
    path = control_path(http.host, http.port)
    model = locate_model(engine.model, engine.load_format, engine.revision)
    check(settings, model)
    check_quantised(settings, model)
    _check_event_log(settings.launch)
    _check_files_at(settings.launch)
    with (
        bound(http.host, http.port) as listener,
        locate_store(settings.launch, left.note_process) as store,
        _nodes(settings, left, say, orders) as nodes,
    ):
        say(f"Ray is up after {time.monotonic() - start_s:.1f} s")

        def plan(node: Node) -> IslandPlan:
            island = plan_island(settings, model, node, left.prefix)
            if island.shares_gpus:
                say(f"{node.name} has fewer GPUs than instances: they take turns, and share the memory")
            return island

        islands = [plan(node) for node in nodes.first]
        gateways = plan_gateways(settings, model, islands, store.url, nodes.launcher, path)

        def whole(island: IslandPlan) -> IslandPlan:
            """Returns the island with its own gateway, if islands have one. The launcher's host has others."""
            if not settings.launch.island_gateways or island.node.is_launchers:
                return island
            return replace(island, gateway=plan_island_gateway(gateways[0], island.node))

        url = f"http://{http.host}:{http.port}/v1"

        def ready() -> None:
            orders.up()
            say(f"ready after {time.monotonic() - start_s:.1f} s: {url}")

        # It imports ray, which must be set up first.
        from alignedserve.launch.system_supervisor import SystemPlan, SystemSupervisor

        async def supervise() -> None:
            system = SystemPlan(
                [whole(island) for island in islands],
                lambda node: whole(plan(node)),
                gateways,
                store,
                settings.keys,
                path,
                listener,
                [os.path.abspath(os.path.expanduser(each)) for each in settings.launch.lora_modules_from],
                http.shutdown_timeout,
            )
            supervisor = SystemSupervisor(system, nodes, say, ready)
            orders.tell(supervisor.stop)
            await supervisor.run()

        asyncio.run(supervise())


def _check_event_log(config: LaunchConfig) -> None:
    """Checks the event log, if it is on this machine. Raises ValueError."""
    if config.event_log is not None and config.address is None:
        try:
            make_directory(config.event_log)
        except OSError as error:
            raise ValueError(f"event_log={config.event_log!r}: {error.strerror}") from None


def _check_files_at(config: LaunchConfig) -> None:
    """Checks the place of files, if the gateway is on this machine. Raises ValueError."""
    if config.files_at is not None and config.address is None:
        try:
            make_home(config.files_at)
        except ValueError as error:
            raise ValueError(f"files_at: {error}") from None


def _nodes(settings: Settings, left: Leftovers, say: Say, orders: Orders) -> AbstractContextManager[Nodes]:
    say(f"starting AlignedServe {__version__}")
    token = secrets.token_hex(32)
    if settings.launch.address is None:
        return this_machine(settings.launch, token, left)
    needs_gpus = settings.engine.device == "cuda"
    return nodes_of(settings.launch.address, settings.launch, needs_gpus, token, say, orders)
