"""A gateway in front of a scripted island, with access to its telemetry."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.scripted import ScriptedRouter
from tests.gateway.served import Served, served

BODY = {"model": "demo", "messages": [{"role": "user", "content": "How far?"}]}


@dataclass
class Observed(Served):
    async def chat(self, headers: dict[str, str] | None = None, **options: Any) -> httpx2.Response:
        return await self.http.post("/v1/chat/completions", json=BODY | options, headers=headers)

    async def metrics(self) -> dict[str, float]:
        """Returns every sample by its name and labels as in Prometheus, without the prefix."""
        text = (await self.http.get("/metrics")).text
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        found = {}
        for name, labels, value, *_ in samples:
            written = ",".join(f'{label}="{labels[label]}"' for label in sorted(labels))
            found[f"{name.removeprefix('alignedserve:')}{{{written}}}"] = value
        return found


@asynccontextmanager
async def observed(router: ScriptedRouter | None = None, **options: Any) -> AsyncIterator[Observed]:
    async with served(router, **options) as at:
        # A gateway answers before it has found its router.
        await at.router.until(lambda: bool(list(at.router.hub)))
        yield Observed(**vars(at))
