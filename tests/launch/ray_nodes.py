"""A Ray cluster of two nodes on this machine: `python -m tests.launch.ray_nodes`, until its input ends.

Ray's token and directory are in the environment. It prints the cluster's address and the process id of the second
node's raylet. For each line of input it adds a node, and prints the process id of its raylet.
"""

from __future__ import annotations

import sys
from typing import Any

from ray.cluster_utils import Cluster

from alignedserve.launch.ray_cluster import OBJECT_STORE_BYTES


def main() -> None:
    options: dict[str, Any] = {"num_cpus": 5, "object_store_memory": OBJECT_STORE_BYTES}
    # Some of its methods have no annotations.
    cluster: Any = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})

    def added() -> int:
        (raylet,) = cluster.add_node(**options).all_processes["raylet"]
        return int(raylet.process.pid)

    print(cluster.address, added(), flush=True)
    for _ in sys.stdin:
        print(added(), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
