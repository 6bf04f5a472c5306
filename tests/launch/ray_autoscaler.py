"""A Ray cluster on this machine whose autoscaler adds and removes nodes, until its input ends.

`python -m tests.launch.ray_autoscaler DIRECTORY`: a directory for its configuration.

Ray's token and directory are in the environment. It prints the cluster's address when the autoscaler runs. Nodes are
raylets below this process; each may be an island, and there are none at first.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# before Ray reads the environment: what its own tests of the autoscaler set
HEAD_ID = "f" * 51 + "00000"
os.environ.update(AUTOSCALER_UPDATE_INTERVAL_S="1", RAY_FAKE_CLUSTER="1")

from ray.cluster_utils import Cluster  # noqa: E402

from alignedserve.launch.ports import free_port  # noqa: E402
from alignedserve.launch.ray_cluster import OBJECT_STORE_BYTES  # noqa: E402

IDLE_S = 3.0


def main(directory: Path) -> None:
    port = free_port("127.0.0.1")
    config = {
        "cluster_name": "fake",
        "max_workers": 8,
        "upscaling_speed": 100.0,
        "idle_timeout_minutes": IDLE_S / 60,
        "provider": {
            "type": "fake_multinode",
            "head_node_id": HEAD_ID,
            "launch_multiple": True,
            # They all have this machine's address.
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": f"127.0.0.1:{port}",
        },
        "auth": {},
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "island": {
                "resources": {"CPU": 5, "island": 1, "object_store_memory": OBJECT_STORE_BYTES},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 8,
            },
        },
        "head_node_type": "ray.head.default",
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }
    path = directory / "autoscaling.json"
    path.write_text(json.dumps(config))
    os.environ["RAY_OVERRIDE_NODE_ID_FOR_TESTING"] = HEAD_ID
    # Some of its methods have no annotations.
    cluster: Any = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "node_ip_address": "127.0.0.1",
            "gcs_server_port": port,
            "autoscaling_config": str(path),
        },
    )
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
