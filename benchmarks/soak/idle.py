"""Checks that an idle server has nothing left of requests."""

from __future__ import annotations

import asyncio
import time

import httpx2

from benchmarks.footprint import Footprint
from benchmarks.soak.victims import segments_beside

IDLE_S = 60.0
_LOOK_S = 0.2
# Metrics of running work.
_OPEN = tuple(
    f"alignedserve:{name}" for name in ("num_requests_running", "num_requests_waiting", "batch_jobs")
)


async def left_of_requests(url: str, footprint: Footprint) -> str:
    """Returns what is still present after a while; empty if nothing is."""
    give_up_s = time.monotonic() + IDLE_S
    async with httpx2.AsyncClient(base_url=url, timeout=30) as http:
        while (left := await _left(http, footprint)) and time.monotonic() < give_up_s:
            await asyncio.sleep(_LOOK_S)
    return left


async def _left(http: httpx2.AsyncClient, footprint: Footprint) -> str:
    cluster = (await http.get("/v1/cluster")).json()
    used = {
        each["instance_id"]: each["blocks"]["used"]
        for each in cluster.get("processes", [])
        if each["state"] != "up" or each["blocks"]["used"] or sum(each["requests"].values())
    }
    if used or cluster.get("requests", {"?": 1}):
        return f"{used or ''} {cluster.get('requests')}"
    footprint.note()
    segments = segments_beside(footprint.paths)
    if len(segments) != 1:
        return f"shared memory of pools that died: {sorted(map(str, segments))}"
    metrics = (await http.get("/metrics")).text
    return "; ".join(line for line in metrics.splitlines() if _is_open(line))


def _is_open(line: str) -> bool:
    return line.startswith(_OPEN) and float(line.split()[-1]) != 0
