"""Where islands can be: on this machine, under a Ray of its own; or on the nodes of a Ray cluster, one island each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from alignedserve.launch.config import LaunchConfig
from alignedserve.launch.leftovers import removing
from alignedserve.launch.plan import Node, free_shm_bytes
from alignedserve.launch.ports import free_port
from alignedserve.launch.ray_cluster import directory_of, joined_ray, local_ray
from alignedserve.process.private_files import can_others_write
from alignedserve.protocol.address import RouterAddress

# The name of the socket, which is in a directory of this system's own.
_ROUTER_SOCKET = "router.sock"
_NODES_POLL_S = 1.0


@contextmanager
def this_machine(config: LaunchConfig, token: str, prefix: str) -> Iterator[list[Node]]:
    """Names of shared memory begin with `prefix`; what is left of it at the end is removed."""
    num_instances = sum(config.instances().values())
    num_threads = threads_of_each(config)
    with removing(prefix) as left, local_ray(left.directory, num_instances + 3, num_threads) as ray:
        left.note_processes()
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        address = RouterAddress.unix(str(left.directory / _ROUTER_SOCKET), token)
        yield [Node("localhost", None, num_gpus, free_shm_bytes(), address)]


def threads_of_each(config: LaunchConfig) -> int:
    """Returns the number of threads of an instance on a CPU, where the environment sets none."""
    return max(1, len(os.sched_getaffinity(0)) // sum(config.instances().values()))


@contextmanager
def nodes_of(
    address: str, config: LaunchConfig, needs_gpus: bool, token: str, say: Callable[[str], None]
) -> Iterator[list[Node]]:
    with joined_ray(address) as ray:
        if can_others_write(directory := directory_of(ray)):
            say(
                f"other users of this machine can write in Ray's directory, {directory}: start Ray with RAY_TMPDIR"
            )
        nodes = _usable_nodes(ray, needs_gpus)
        while len(nodes) < (config.num_islands or 1):
            say(f"{len(nodes)} of {config.num_islands or 1} nodes are there")
            time.sleep(_NODES_POLL_S)
            nodes = _usable_nodes(ray, needs_gpus)
        chosen = nodes[: config.num_islands]
        yield [_node(ray, ray_node, number, token) for number, ray_node in enumerate(chosen)]


def _usable_nodes(ray: Any, needs_gpus: bool) -> list[dict[str, Any]]:
    """Returns the nodes with GPUs if there are any or GPUs are needed, else all nodes."""
    alive = sorted(
        (ray_node for ray_node in ray.nodes() if ray_node["Alive"]),
        key=lambda ray_node: str(ray_node["NodeID"]),
    )
    with_gpus = [ray_node for ray_node in alive if ray_node["Resources"].get("GPU", 0) >= 1]
    return with_gpus if with_gpus or needs_gpus else alive


def _node(ray: Any, ray_node: dict[str, Any], number: int, token: str) -> Node:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    host = ray_node["NodeManagerAddress"]
    there = NodeAffinitySchedulingStrategy(ray_node["NodeID"], soft=False)
    probe = ray.remote(_probe).options(num_cpus=0, scheduling_strategy=there)
    port, free_bytes = ray.get(probe.remote(host))
    num_gpus = int(ray_node["Resources"].get("GPU", 0))
    return Node(f"node-{number}", ray_node["NodeID"], num_gpus, free_bytes, RouterAddress(host, port, token))


def _probe(host: str) -> tuple[int, int]:
    return free_port(host), free_shm_bytes()
