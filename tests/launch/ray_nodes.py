"""A Ray cluster of two nodes on this machine: `python -m tests.launch.ray_nodes`, until its input ends.

Ray's token and directory are in the environment. It prints the cluster's address and the process id of the second
node's raylet.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

from alignedserve.launch.ray_cluster import OBJECT_STORE_BYTES


def main() -> None:
    options = {"num_cpus": 5, "object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    second = cluster.add_node(**options)
    (raylet,) = second.all_processes["raylet"]
    print(cluster.address, raylet.process.pid, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
