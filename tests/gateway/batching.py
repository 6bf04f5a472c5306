"""A gateway with a real Redis and a scripted island behind it, and OpenAI's client in front of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx2
import openai
from openai.types import Batch, FileObject

from alignedserve import demo
from alignedserve.batch.config import BatchConfig
from alignedserve.engine.config import EngineConfig
from alignedserve.gateway.config import GatewayConfig, HttpConfig
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.process import GatewayProcess
from alignedserve.process.listening import listen
from alignedserve.protocol.address import RouterAddress
from alignedserve.types import InstanceId
from tests.gateway.scripted import MODEL, TOKEN, ScriptedRouter
from tests.gateway.served import QuickGateway
from tests.store.redis_process import RedisProcess, redis_running

CHATS: Final = "/v1/chat/completions"
# The same as in production, except for shorter times.
QUICK = BatchConfig(lease_s=0.5, look_s=0.1, retry_s=0.01, max_retry_s=0.05)


@dataclass
class Gateway:
    client: openai.AsyncOpenAI
    http: httpx2.AsyncClient
    process: GatewayProcess

    async def upload(self, lines: Sequence[Any] | bytes, name: str = "in.jsonl") -> FileObject:
        content = lines if isinstance(lines, bytes) else jsonl(lines)
        return await self.client.files.create(file=(name, content), purpose="batch")

    async def submit(self, lines: Sequence[Any] | bytes, window: Any = "24h", url: Any = CHATS) -> Batch:
        file = await self.upload(lines)
        return await self.client.batches.create(input_file_id=file.id, endpoint=url, completion_window=window)

    async def until(self, batch: Batch, *statuses: str) -> Batch:
        while batch.status not in statuses:
            assert batch.status not in ("failed", "completed", "expired", "cancelled"), batch
            await asyncio.sleep(0.02)
            batch = await self.client.batches.retrieve(batch.id)
        return batch

    async def lines_of(self, file_id: str | None) -> list[dict[str, Any]]:
        assert file_id
        content = await self.client.files.content(file_id)
        return [json.loads(line) for line in content.text.splitlines()]


@dataclass
class System:
    router: ScriptedRouter
    router_port: int
    redis: RedisProcess
    gateway: Gateway

    @property
    def client(self) -> openai.AsyncOpenAI:
        return self.gateway.client


@asynccontextmanager
async def gateway_on(
    router_port: int,
    store_url: str,
    config: BatchConfig = QUICK,
    name: str = "gateway-0",
    model: ServedModel = MODEL,
    **settings: Any,
) -> AsyncIterator[Gateway]:
    """`settings`: fields of GatewayConfig."""
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        process = QuickGateway(
            GatewayConfig(
                InstanceId(name),
                (RouterAddress("127.0.0.1", router_port, TOKEN),),
                EngineConfig(str(demo.MODEL_DIR)),
                "demo",
                HttpConfig("127.0.0.1", port),
                store_url=store_url,
                batches=config,
                **settings,
            )
        )
        serving = asyncio.create_task(process.serve(model, sock))
        url = f"http://127.0.0.1:{port}"
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            httpx2.AsyncClient(base_url=url, timeout=None) as http,
        ):
            yield Gateway(client, http, process)
        process.stop()
        await serving


def play(
    scenario: Callable[[System], Awaitable[None]], config: BatchConfig = QUICK, limit_s: float = 240
) -> None:
    async def within_time() -> None:
        router = ScriptedRouter()
        port = await router.hub.listen("127.0.0.1", 0)
        async with (
            asyncio.timeout(limit_s),
            redis_running() as redis,
            gateway_on(port, redis.url, config) as gateway,
        ):
            await scenario(System(router, port, redis, gateway))
        router.hub.close()

    asyncio.run(within_time())


def question(number: int, **body: Any) -> dict[str, Any]:
    asked = {"model": "demo", "messages": [{"role": "user", "content": f"How far is {number}?"}]}
    return {"custom_id": f"q{number}", "method": "POST", "url": CHATS, "body": asked | body}


def questions(count: int) -> list[dict[str, Any]]:
    return [question(number) for number in range(count)]


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
