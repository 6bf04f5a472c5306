"""A gateway on real sockets in front of scripted islands, with its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import httpx2
import openai

from alignedserve import demo
from alignedserve.engine.config import EngineConfig
from alignedserve.gateway.config import GatewayConfig, HttpConfig
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.process import GatewayProcess
from alignedserve.launch.settings import taken
from alignedserve.process.listening import listen
from alignedserve.protocol.address import RouterAddress
from alignedserve.types import InstanceId
from alignedserve.vopr.front_end.preparer_in_place import PreparerInPlace
from tests.gateway.scripted import MODEL, TOKEN, ScriptedRouter

GATEWAY = InstanceId("gateway-0")
QUESTION = [{"role": "user", "content": "How far?"}]
ASKED: Any = QUESTION
JSON = {"content-type": "application/json"}


class QuickGateway(GatewayProcess):
    """Prepares small bodies itself, because otherwise most tests would have to wait for a process to start."""

    preparer_class = PreparerInPlace


@dataclass
class Served:
    router: ScriptedRouter
    client: openai.AsyncOpenAI
    http: httpx2.AsyncClient
    router_port: int
    process: GatewayProcess

    async def post(self, path: str, body: Any) -> httpx2.Response:
        return await self.http.post(path, json=body)


@asynccontextmanager
async def served(
    router: ScriptedRouter | None = None,
    model: ServedModel = MODEL,
    seed: int = 0,
    kind: type[GatewayProcess] = QuickGateway,
    **settings: Any,
) -> AsyncIterator[Served]:
    """`settings`: fields of GatewayConfig and HttpConfig."""
    async with served_by([router or ScriptedRouter()], model, seed, kind, **settings) as found:
        yield found


@asynccontextmanager
async def served_by(
    routers: list[ScriptedRouter],
    model: ServedModel = MODEL,
    seed: int = 0,
    kind: type[GatewayProcess] = QuickGateway,
    **settings: Any,
) -> AsyncIterator[Served]:
    ports = [await router.hub.listen("127.0.0.1", 0) for router in routers]
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        addresses = tuple(RouterAddress("127.0.0.1", port, TOKEN) for port in ports)
        engine = EngineConfig(str(demo.MODEL_DIR), seed=seed)
        http_config = HttpConfig("127.0.0.1", port, **taken(HttpConfig, settings))
        config = GatewayConfig(
            GATEWAY, addresses, engine, "demo", http_config, **taken(GatewayConfig, settings)
        )
        assert not settings.keys() - {each.name for of in (HttpConfig, GatewayConfig) for each in fields(of)}
        process = kind(config)
        serving = asyncio.create_task(process.serve(model, sock))
        url = f"http://127.0.0.1:{port}"
        found = None
        try:
            async with (
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
                httpx2.AsyncClient(base_url=url, timeout=None) as http,
            ):
                found = Served(routers[0], client, http, ports[0], process)
                yield found
        finally:
            process.stop()
            await serving
            for router in [*([found.router] if found else []), *routers]:
                router.hub.close()


def play(scenario: Callable[[], Awaitable[None]], limit_s: float = 120.0) -> None:
    """Runs the scenario. `limit_s` is far more than it takes, even beside others."""

    async def within_time() -> None:
        async with asyncio.timeout(limit_s):
            await scenario()

    asyncio.run(within_time())


class SharedGateway:
    """A gateway that several tests use one after the other, because starting one takes longer than most of them."""

    def __init__(self, runner: asyncio.Runner, at: Served) -> None:
        self._runner = runner
        self._at = at

    @classmethod
    @contextmanager
    def running(cls, **options: Any) -> Iterator[SharedGateway]:
        """`options`: those of `served`."""
        with asyncio.Runner() as runner:
            serving = served(**options)
            at = runner.run(serving.__aenter__())
            try:
                yield cls(runner, at)
            finally:
                runner.run(serving.__aexit__(None, None, None))

    def play(self, scenario: Callable[[Served], Awaitable[None]]) -> None:
        """Shows none of the earlier requests, and checks that nothing is open afterwards."""

        async def within_time() -> None:
            async with asyncio.timeout(120):
                await scenario(self._at)
                await self._at.process.ending.drain_state.until_idle()

        router = self._at.router
        router.submitted.clear()
        self._runner.run(within_time())
        assert router._open == {}
