"""The Ray shell of each role."""

from __future__ import annotations

from typing import Any

from alignedserve.gateway.actor import GatewayActor
from decode_worker.actor import DecodeActor
from kvpool.actor import PoolActor
from prefill_worker.actor import PrefillActor
from router.actor import RouterActor

ACTORS: dict[str, Any] = {
    "router": RouterActor,
    "kvpool": PoolActor,
    "prefill": PrefillActor,
    "decode": DecodeActor,
    "gateway": GatewayActor,
}
