"""Whether the island can answer, asked of those who would: the router knows which processes are there."""

from __future__ import annotations

from typing import Any

from alignedserve.gateway.errors import ApiError
from alignedserve.gateway.island import Island
from alignedserve.messages import Cluster, Part

# without one of each, nothing can be answered
NEEDED = ("kvpool", "prefill", "decode")


async def health(island: Island) -> tuple[int, dict[str, Any]]:
    """HTTP status and body."""
    try:
        cluster = await island.cluster()
    except ApiError as error:
        return 503, {"status": "unavailable", "reason": str(error)}
    missing = [role for role in NEEDED if not _has(cluster, role)]
    if missing:
        return 503, {"status": "unavailable", "reason": f"no {' and no '.join(missing)} process is up"}
    down = [part.instance_id for part in cluster.parts if part.state != "up"]
    return 200, {"status": "degraded", "down": down} if down else {"status": "ok"}


def cluster_body(cluster: Cluster) -> dict[str, Any]:
    return {"processes": [_part(part) for part in cluster.parts], "requests": cluster.requests}


def _has(cluster: Cluster, role: str) -> bool:
    return any(part.role == role and part.state == "up" for part in cluster.parts)


def _part(part: Part) -> dict[str, Any]:
    return {
        "role": part.role,
        "instance_id": part.instance_id,
        "epoch": part.epoch,
        "pid": part.pid,
        "state": part.state,
        "blocks": {"used": part.num_blocks - part.num_free_blocks, "free": part.num_free_blocks},
        "requests": part.requests,
    }
