"""Whether the system can answer. The routers are asked, because they know which processes their islands have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from alignedserve.gateway.http.access import DrainState
from alignedserve.gateway.http.errors import ApiError
from alignedserve.protocol.messages import Cluster, ProcessStatus
from alignedserve.store import Store
from alignedserve.store.homes import WatchedHome

# Roles without which an island can't answer. Colocated instances may replace the last two.
NEEDED = ("kvpool", "prefill", "decode")
NEEDED_COLOCATED = ("kvpool", "colocated")
_STORE_REASON = "files and batches answer 503, and batches wait: their store can't be reached, or can't write"

_FILES_REASON = (
    "files answer 503, and batches wait: the place of --files-at can't be reached, or can't be written"
)


# Asks each island's router. Returns the answers by island number. Raises ApiError if none answers.
AskClusters = Callable[[], Awaitable[Mapping[int, Cluster]]]


async def health(
    ask_clusters: AskClusters,
    drain_state: DrainState,
    store: Store | None,
    home: WatchedHome | None = None,
    missing: Sequence[str] = (),
) -> tuple[int, dict[str, Any]]:
    """Returns the HTTP status and the body.

    One island that can answer suffices. Without the store, or the place for files, real time continues. Failed links
    only make copies slower. `missing` are messages about islands that should run and do not."""
    if drain_state.is_draining:
        return 503, {"status": "unavailable", "reason": "this server is stopping"}
    lacking = {"missing": list(missing)} if missing else {}
    try:
        clusters = (await ask_clusters()).values()
    except ApiError as error:
        return 503, {"status": "unavailable", "reason": str(error)} | lacking
    roles = [_missing(cluster) for cluster in clusters]
    if all(roles):
        reason = f"no {' and no '.join(roles[0])} process is up"
        return 503, {"status": "unavailable", "reason": reason} | lacking
    down = [
        process.instance_id for cluster in clusters for process in cluster.processes if process.state != "up"
    ]
    found: dict[str, Any] = {"down": down} if down else {}
    found |= lacking
    if store and store.is_down:
        found |= {"store": "down", "reason": _STORE_REASON}
    elif home and home.is_down:
        found |= {"files": "down", "reason": _FILES_REASON}
    over_host = [
        f"{stager} to {process.instance_id}"
        for cluster in clusters
        for process in cluster.processes
        for stager in process.stats.over_host
    ]
    status = "degraded" if found else "ok"
    return 200, {"status": status} | found | ({"over_host": over_host} if over_host else {})


def cluster_body(clusters: Mapping[int, Cluster]) -> dict[str, Any]:
    """Returns the body of `/v1/cluster`. `clusters` are the routers' answers by island number."""
    processes = [
        _process_status(process) | {"island": number}
        for number, cluster in clusters.items()
        for process in cluster.processes
    ]
    return {"processes": processes, "requests": _requests(clusters.values())}


def _missing(cluster: Cluster) -> list[str]:
    up = {process.role for process in cluster.processes if process.state == "up"}
    is_colocated = any(process.role == "colocated" for process in cluster.processes)
    return [role for role in (NEEDED_COLOCATED if is_colocated else NEEDED) if role not in up]


def _requests(clusters: Iterable[Cluster]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for cluster in clusters:
        total.update(cluster.requests)
    return dict(total)


def _process_status(process: ProcessStatus) -> dict[str, Any]:
    return {
        "role": process.role,
        "instance_id": process.instance_id,
        "epoch": process.epoch,
        "started_s": process.started_s,
        "pid": process.pid,
        "state": process.state,
        "blocks": {"used": process.num_blocks - process.num_free_blocks, "free": process.num_free_blocks},
        "requests": process.requests,
    }
