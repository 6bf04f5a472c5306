"""Clients that ask and go away, each at another point: before its prompt is read, in the queue, in mid-stream."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx2

from tests.launch.server import NO_TLS

NUM_CLIENTS = 200


def storm(url: str) -> tuple[int, int]:
    """How many of them left before their answer began, and how many in the middle of it."""
    return asyncio.run(_storm(url))


async def _storm(url: str) -> tuple[int, int]:
    random_ = random.Random(7)
    clients = [_leave_early, _leave_early, _leave_in_the_middle]
    leaving = [random_.choice(clients)(url, number, random_) for number in range(NUM_CLIENTS)]
    heard = await asyncio.gather(*leaving)
    return heard.count(0), len(heard) - heard.count(0)


def _body(number: int, is_stream: bool) -> dict[str, Any]:
    # long prompts too, and some of them best effort: some leave in prefill, staged, and in the pool
    prompt = f"Count from {number} to {number + 20}. " * (1 + number % 7 * 4)
    tier = "flex" if number % 3 == 0 else "default"
    settings = {"max_tokens": 400, "ignore_eos": True, "n": 1 + number % 2, "service_tier": tier}
    return {"prompt": prompt, "stream": is_stream} | settings


async def _leave_early(url: str, number: int, random_: random.Random) -> int:
    """After so long, wherever it is by then."""
    patience_s = random_.uniform(0.0, 4.0)
    body = _body(number, is_stream=number % 2 == 0)
    async with httpx2.AsyncClient(timeout=120, verify=NO_TLS) as client:
        asking = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
        await asyncio.wait({asking}, timeout=patience_s)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    return 0


async def _leave_in_the_middle(url: str, number: int, random_: random.Random) -> int:
    """After so many chunks."""
    most = random_.randrange(1, 40)
    num_chunks = 0
    async with (
        httpx2.AsyncClient(timeout=120, verify=NO_TLS) as client,
        client.stream("POST", f"{url}/v1/completions", json=_body(number, is_stream=True)) as response,
    ):
        async for _ in response.aiter_lines():
            num_chunks += 1
            if num_chunks == most:
                break
    return num_chunks
