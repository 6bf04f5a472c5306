"""A gateway with its telemetry at hand, in front of a scripted island."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from alignedserve import demo
from alignedserve.config import EngineConfig
from alignedserve.gateway.process import GatewayConfig, GatewayProcess, listen
from alignedserve.types import InstanceId
from alignedserve.wire import RouterAddress
from tests.gateway.scripted import MODEL, TOKEN, ScriptedRouter

BODY = {"model": "demo", "messages": [{"role": "user", "content": "How far?"}]}


@dataclass
class Observed:
    router: ScriptedRouter
    process: GatewayProcess
    http: httpx.AsyncClient

    async def chat(self, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=BODY | options, headers=headers)

    async def metrics(self) -> dict[str, float]:
        """Every sample, by its name and labels as Prometheus writes them, without the prefix."""
        text = (await self.http.get("/metrics")).text
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        found = {}
        for name, labels, value, *_ in samples:
            written = ",".join(f'{label}="{labels[label]}"' for label in sorted(labels))
            found[f"{name.removeprefix('alignedserve:')}{{{written}}}"] = value
        return found


@asynccontextmanager
async def observed(router: ScriptedRouter | None = None, **options: Any) -> AsyncIterator[Observed]:
    router = router or ScriptedRouter()
    address = RouterAddress("127.0.0.1", await router.hub.listen("127.0.0.1", 0), TOKEN)
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        engine = EngineConfig(str(demo.MODEL_DIR))
        config = GatewayConfig(
            InstanceId("gateway-0"), (address,), "127.0.0.1", port, engine, "demo", **options
        )
        process = GatewayProcess(config)
        serving = asyncio.create_task(process.serve(MODEL, sock))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            # a gateway answers before it has found its router
            await router.until(lambda: bool(list(router.hub)))
            yield Observed(router, process, http)
        process.stop()
        await serving
    router.hub.close()
