"""The hosts of islands: this machine, under its own Ray, or the nodes of a Ray cluster, one island each.

Nodes are added and lost while the system runs. If nodes are marked as islands (Ray's resource ISLAND), Ray's autoscaler
is asked for the wanted number of them, and other nodes are not used.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from alignedserve.launch.config import LaunchConfig
from alignedserve.launch.first_process import Orders
from alignedserve.launch.growth import Growth
from alignedserve.launch.leftovers import Leftovers
from alignedserve.launch.node_choice import NodeChoice
from alignedserve.launch.plan import Node, free_shm_bytes
from alignedserve.launch.ports import free_port
from alignedserve.launch.ray_cluster import directory_of, joined_ray, local_ray
from alignedserve.process.private_files import can_others_write
from alignedserve.protocol.address import RouterAddress

# the names of the sockets in the system's own directory
_ROUTER_SOCKET, _LAUNCHER_SOCKET = "router.sock", "launcher.sock"
_LOOPBACK = "127.0.0.1"
LOOK_S = 1.0
# seconds that a node has to run something before it is given up
PROBE_S = 60.0
# A node that may be an island has one of this resource of Ray's. An island's router holds ROUTER_HOLDS of it, so that
# the autoscaler does not consider the node idle. Two routers hold it while one replaces the other.
ISLAND = "island"
ROUTER_HOLDS = 0.01


@dataclass
class Change:
    """The changes since the last look."""

    come: list[Node] = field(default_factory=list)
    # the numbers of islands that have lost their node
    gone: list[int] = field(default_factory=list)
    # what keeps nodes from being islands, a line each
    problems: list[str] = field(default_factory=list)


class Nodes(Protocol):
    # the nodes at first, at least one
    first: list[Node]
    # where the launcher listens
    launcher: RouterAddress
    # whether nodes can be added and lost
    may_change: bool
    # the number of nodes to wait for at first
    num_wanted: int
    # decides the number of nodes later; None: all that exist
    growth: Growth | None

    async def look(self) -> Change: ...

    async def want(self, count: int) -> None:
        """Sets the wanted number of nodes."""

    def given_back(self, number: int) -> None:
        """Notes that the island has ended without a failure."""

    def failed(self, number: int) -> None:
        """Notes that the island failed. Its node is tried again later, as a new island."""

    def worked(self, number: int) -> None:
        """Notes that the island is up."""


class ThisMachine:
    may_change = False
    num_wanted = 1
    growth: Growth | None = None

    def __init__(self, node: Node, launcher: RouterAddress) -> None:
        self.first = [node]
        self.launcher = launcher

    async def look(self) -> Change:
        return Change()

    async def want(self, count: int) -> None:
        """There is no other node."""

    def given_back(self, number: int) -> None:
        """There is no other node."""

    def failed(self, number: int) -> None:
        """There is no other node."""

    def worked(self, number: int) -> None:
        """There is no other node."""


@contextmanager
def this_machine(config: LaunchConfig, token: str, left: Leftovers) -> Iterator[Nodes]:
    """Yields this machine as the only node. Its sockets and Ray's files are in the directory that is removed in the
    end."""
    # the router and the pool included
    num_processes = sum(config.instances().values()) + config.gateways + 2
    num_threads = threads_of_each(config)
    with local_ray(left.directory, num_processes, num_threads) as ray:
        left.note_processes()
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        router, launcher = (
            RouterAddress.unix(str(left.directory / name), token)
            for name in (_ROUTER_SOCKET, _LAUNCHER_SOCKET)
        )
        yield ThisMachine(Node("localhost", None, num_gpus, free_shm_bytes(), router), launcher)


def threads_of_each(config: LaunchConfig) -> int:
    """Returns the number of threads of an instance on a CPU, if the environment does not set it."""
    return max(1, len(os.sched_getaffinity(0)) // sum(config.instances().values()))


@contextmanager
def nodes_of(
    address: str,
    config: LaunchConfig,
    needs_gpus: bool,
    token: str,
    say: Callable[[str], None],
    orders: Orders,
) -> Iterator[Nodes]:
    """Yields the nodes of a cluster when there are enough. Raises Stopped at an order meanwhile."""
    with joined_ray(address) as ray:
        # A kill would leave what the autoscaler is asked for.
        orders.up()
        if can_others_write(directory := directory_of(ray)):
            say(
                f"other users of this machine can write in Ray's directory, {directory}: start Ray with RAY_TMPDIR"
            )
        nodes = ClusterNodes(ray, config, needs_gpus, token)
        said = 0
        with nodes.asking():
            while num_missing := nodes.take_first():
                if num_missing != said:
                    said = num_missing
                    say(f"{nodes.num_wanted - num_missing} of {nodes.num_wanted} nodes are there")
                orders.pause(LOOK_S)
            if nodes.may_grow and nodes.growth is None:
                say(
                    f"no node has the resource {ISLAND}: all nodes are used, and the autoscaler is asked for none"
                )
            yield nodes


class ClusterNodes:
    may_change = True

    def __init__(self, ray: Any, config: LaunchConfig, needs_gpus: bool, token: str) -> None:
        self._ray = ray
        self._needs_gpus = needs_gpus
        self._token = token
        self._choice = NodeChoice(config.max_islands)
        self._min, self._max = config.min_islands, config.max_islands
        self.num_wanted = config.min_islands
        self.growth: Growth | None = None
        self.first: list[Node] = []
        # whether there ever was a node with a mark; then others are not used
        self._has_marks = False
        # the number of nodes that the autoscaler was asked for
        self._num_asked = 0
        # Gateways are on this node, unless islands have their own.
        host = ray.util.get_node_ip_address() if config.island_gateways else _LOOPBACK
        self.launcher = RouterAddress(host, free_port(host), token)

    @property
    def may_grow(self) -> bool:
        return self._max is not None and self._max > self._min

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Withdraws the request to the autoscaler after the block."""
        try:
            yield
        finally:
            self._ask(0)

    def take_first(self) -> int:
        """Takes the present nodes if they are enough. Otherwise asks the autoscaler. Returns the number that is
        missing."""
        nodes = self._usable()
        if self.may_grow and (self._has_marks or not nodes):
            self._ask(self._min)
        if len(nodes) < self.num_wanted:
            return self.num_wanted - len(nodes)
        come, _ = self._choice.look(list(nodes), time.monotonic())
        self.first = [self._node(nodes[node_id], number) for number, node_id in come.items()]
        if not self._has_marks:
            self._ask(0)
        elif self._max is not None and self.may_grow:
            self.growth = Growth(self._min, self._max, len(self.first))
            self._choice.most = self.growth.wanted
        return 0

    async def look(self) -> Change:
        from ray.exceptions import RayError

        nodes = await asyncio.to_thread(self._usable)
        come, gone = self._choice.look(list(nodes), time.monotonic())
        change = Change(gone=gone)
        for number, node_id in come.items():
            try:
                change.come.append(await asyncio.to_thread(self._node, nodes[node_id], number))
            except RayError as error:
                self.failed(number)
                reason = str(error).strip().split("\n")[0]
                change.problems.append(f"{nodes[node_id]['NodeManagerAddress']}: {reason}")
        return change

    async def want(self, count: int) -> None:
        if count != self._choice.most or count != self._num_asked:
            self._choice.most = count
            await asyncio.to_thread(self._ask, count)

    def failed(self, number: int) -> None:
        self._choice.failed(number, time.monotonic())

    def worked(self, number: int) -> None:
        self._choice.worked(number)

    def given_back(self, number: int) -> None:
        self._choice.given_back(number)

    def _ask(self, count: int) -> None:
        """Asks the autoscaler for `count` nodes with a mark, present ones included. It keeps the request until the next
        one."""
        if count != self._num_asked:
            from ray.autoscaler.sdk import request_resources

            self._num_asked = count
            request_resources(bundles=[{ISLAND: 1}] * count)

    def _usable(self) -> dict[str, dict[str, Any]]:
        """Returns nodes by their ids: those with marks, if there ever was one; else those with GPUs, if there are any
        or GPUs are needed; else those with CPUs."""
        alive = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        marked = {node_id: node for node_id, node in alive.items() if _is_marked(node)}
        self._has_marks |= bool(marked)
        if self._has_marks:
            return dict(sorted(marked.items()))
        with_gpus, with_cpus = (
            {node_id: node for node_id, node in alive.items() if node["Resources"].get(what, 0) >= 1}
            for what in ("GPU", "CPU")
        )
        return dict(sorted((with_gpus if with_gpus or self._needs_gpus else with_cpus).items()))

    def _node(self, found: dict[str, Any], number: int) -> Node:
        """Returns the node as an island. Raises RayError if nothing can be run on it."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        host = found["NodeManagerAddress"]
        there = NodeAffinitySchedulingStrategy(found["NodeID"], soft=False)
        probe = self._ray.remote(_probe).options(num_cpus=0, scheduling_strategy=there)
        port, free_bytes = self._ray.get(probe.remote(host), timeout=PROBE_S)
        return Node(
            f"node-{number}",
            found["NodeID"],
            int(found["Resources"].get("GPU", 0)),
            free_bytes,
            RouterAddress(host, port, self._token),
            number,
            is_marked=_is_marked(found),
            is_launchers=found["NodeID"] == self._ray.get_runtime_context().get_node_id(),
        )


def _is_marked(node: dict[str, Any]) -> bool:
    return bool(node["Resources"].get(ISLAND, 0) >= 1)


def _probe(host: str) -> tuple[int, int]:
    return free_port(host), free_shm_bytes()
