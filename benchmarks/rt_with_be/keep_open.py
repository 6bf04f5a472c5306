"""The client of a server without a batch API: keeps NUM lines open until all are answered, in its own process.

    python -m benchmarks.rt_with_be.keep_open URL NUM < ASKED.json > ANSWERED.jsonl

It does not stream, which would cost the server time for nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx2

ENDPOINT = "/v1/chat/completions"
TIMEOUT_S = 600.0


async def keep_open(url: str, asked: dict[str, dict[str, Any]], num_open: int) -> None:
    todo = iter(asked.items())
    limits = httpx2.Limits(max_connections=num_open, max_keepalive_connections=num_open)
    async with (
        httpx2.AsyncClient(base_url=url, limits=limits, timeout=TIMEOUT_S) as http,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(num_open):
            group.create_task(_one_by_one(http, todo))


async def _one_by_one(http: httpx2.AsyncClient, todo: Iterator[tuple[str, dict[str, Any]]]) -> None:
    for name, body in todo:
        print(json.dumps({"line": name} | await _answer(http, body)), flush=True)


async def _answer(http: httpx2.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = await http.post(ENDPOINT, json=body)
    except httpx2.HTTPError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if answer.status_code != 200:
        return {"error": f"HTTP {answer.status_code}: {answer.text[:500]}"}
    return {"output_len": answer.json()["usage"]["completion_tokens"]}


if __name__ == "__main__":
    asyncio.run(keep_open(sys.argv[1], json.load(sys.stdin), int(sys.argv[2])))
