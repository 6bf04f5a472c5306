"""Many calls by one client: unread streams, embeddings with the most texts allowed, and hundreds cancelled at once.

Each call is quick, but together they once blocked the event loop.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

import httpx2

from benchmarks.attack.target import Finding, Target

RESPONSES, EMBEDDINGS, CHAT = "/v1/responses", "/v1/embeddings", "/v1/chat/completions"
NUM_STREAMS = 400
NUM_CALLS, NUM_INPUTS = 8, 2048
USER = {"role": "user", "content": "x"}
ATTACK_S = 6.0


async def attack_unread_responses(target: Target) -> Finding:
    """Opens 400 streams of responses with the 20 most likely tokens for each token. The client reads nothing and hangs
    up."""
    body = {"input": "hello", "stream": True, "top_logprobs": 20, "max_output_tokens": 1500, "store": False}
    body |= {"ignore_eos": True, "service_tier": "flex"}
    return await _unread(target, RESPONSES, body, "responses that nobody reads")


async def attack_unread_chats(target: Target) -> Finding:
    """Does the same with chats without the likely tokens."""
    body: dict[str, Any] = {"messages": [USER], "stream": True, "max_tokens": 1500, "ignore_eos": True}
    return await _unread(target, CHAT, body | {"service_tier": "flex"}, "chats that nobody reads")


async def attack_many_embeddings(target: Target) -> Finding:
    """Makes 8 real-time calls with 2,048 texts each."""
    body = {"input": [f"text number {number}" for number in range(NUM_INPUTS)]}
    async with httpx2.AsyncClient(base_url=target.url, timeout=60) as http:
        begun_s = time.monotonic()
        calls = [asyncio.create_task(http.post(EMBEDDINGS, json=body)) for _ in range(NUM_CALLS)]
        done, left = await asyncio.wait(calls, timeout=9.0)
        for call in left:
            call.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    statuses = Counter(call.result().status_code for call in done)
    held = statuses.keys() <= {200, 429, 503}
    detail = f"{dict(statuses)} in {time.monotonic() - begun_s:.1f} s, {len(left)} not done"
    return Finding("embeddings of 2,048 texts", held, detail)


async def attack_background_cancelled(target: Target) -> Finding:
    """Creates 150 background responses, cancels them all at once, and then deletes them all."""
    body = {"input": "x", "background": True, "max_output_tokens": 500, "ignore_eos": True}
    async with httpx2.AsyncClient(base_url=target.url, timeout=60) as http:
        made = await asyncio.gather(*(http.post(RESPONSES, json=body) for _ in range(150)))
        ids = [each.json()["id"] for each in made if each.status_code == 200]
        cancelled = await asyncio.gather(*(http.post(f"{RESPONSES}/{each}/cancel") for each in ids))
        deleted = await asyncio.gather(*(http.delete(f"{RESPONSES}/{each}") for each in ids))
        found = await asyncio.gather(*(http.get(f"{RESPONSES}/{each}") for each in ids))
    statuses = [sorted({each.status_code for each in some}) for some in (made, cancelled, deleted, found)]
    over = Counter(each.json()["status"] for each in cancelled if each.status_code == 200)
    held = statuses == [[200], [200], [200], [404]] and over.keys() <= {
        "cancelled",
        "completed",
        "incomplete",
    }
    return Finding("responses cancelled at once", held, f"{len(ids)}: {statuses}, {dict(over)}")


async def _unread(target: Target, path: str, body: dict[str, Any], name: str) -> Finding:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {target.host}\r\nContent-Length: {len(content)}\r\n"
    said = f"{head}Content-Type: application/json\r\n\r\n".encode() + content
    pipes = [await asyncio.open_connection(target.host, target.port, limit=1) for _ in range(NUM_STREAMS)]
    begun_s = time.monotonic()
    for reader, writer in pipes:
        # Incoming data stays in the socket.
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(said)
    await asyncio.sleep(ATTACK_S)
    for _, writer in pipes:
        writer.transport.abort()
    async with httpx2.AsyncClient(base_url=target.url, timeout=30 * target.slack) as http:
        answer = await http.post(CHAT, json={"messages": [USER], "max_tokens": 2})
        took_s = time.monotonic() - begun_s - ATTACK_S
    detail = f"{NUM_STREAMS} streams; a chat after they were hung up: {answer.status_code} in {took_s:.2f} s"
    return Finding(name, answer.status_code == 200, detail)
