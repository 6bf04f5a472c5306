"""Many requests at once: many best-effort choices, dropped streams, and prompts that share nothing."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from typing import Any

import httpx2

from benchmarks.attack.target import Finding, Target

PATH = "/v1/completions"
# How long an attack sends requests.
ATTACK_S = 6.0


async def attack_flex_with_many_choices(target: Target) -> Finding:
    """Makes 16 calls with 256 choices, as many as the router's queue accepts."""
    flex = _body(target, n=256, max_tokens=16, service_tier="flex", temperature=1.0, ignore_eos=True)
    async with _client(target) as http, _client(target) as other:
        calls = [
            asyncio.create_task(http.post(PATH, json=flex | {"prompt": f"{n} and on"})) for n in range(16)
        ]
        await asyncio.sleep(0.05)
        times, statuses = await _ask_on(other, _body(target, service_tier="priority", max_tokens=4))
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        # This measures calls while all those requests are aborted.
        again, last = await _ask_on(other, _body(target, service_tier="priority", max_tokens=4), seconds=1.0)
    detail = f"priority calls took {_times(times)} beside them, {_times(again)} while they were aborted"
    return Finding(
        "flex_with_many_choices", {*statuses, *last} == {200}, f"{detail}; {dict(statuses + last)}"
    )


async def attack_streams_dropped(target: Target) -> Finding:
    """Opens 2,000 streams, 50 at a time, and drops each one before or after it has begun."""
    turns, num_begun = asyncio.Semaphore(50), 0

    async def one(number: int) -> None:
        nonlocal num_begun
        async with turns:
            if time.monotonic() > deadline:
                return
            begun = await _drop(target, number)
            num_begun += begun

    deadline = time.monotonic() + ATTACK_S
    await asyncio.gather(*(one(number) for number in range(2000)))
    return await _answers(target, "streams_dropped", f"{num_begun} streams had begun")


async def attack_many_salts(target: Target) -> Finding:
    """Sends 1,000 prompts with the same beginning, 100 at a time. Each has its own salt, so nothing is shared."""
    turns, statuses = asyncio.Semaphore(100), Counter[int]()
    prompt = "the same words again and again " * 20

    async def one(number: int) -> None:
        body = _body(target, prompt=prompt, cache_salt=f"salt {number}", max_tokens=1, service_tier="flex")
        async with turns:
            statuses[(await http.post(PATH, json=body)).status_code] += 1

    async with _client(target) as http:
        calls = [asyncio.create_task(one(number)) for number in range(1000)]
        await asyncio.wait(calls, timeout=ATTACK_S)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    found = await _answers(target, "many_salts", f"answers {dict(statuses)}")
    return Finding(found.name, found.held and statuses.keys() <= {200, 503}, found.detail)


def _body(target: Target, **more: Any) -> dict[str, Any]:
    return {"model": target.model, "prompt": "Count from 1 to 9.", "max_tokens": 16} | more


def _client(target: Target) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        base_url=target.url, timeout=20 * target.slack, limits=httpx2.Limits(max_connections=None)
    )


async def _ask_on(
    http: httpx2.AsyncClient, body: dict[str, Any], seconds: float = ATTACK_S
) -> tuple[list[float], Counter[int]]:
    """Makes one call after the other. Returns how long each took, and their statuses."""
    times: list[float] = []
    statuses, deadline = Counter[int](), time.monotonic() + seconds
    while not times or time.monotonic() < deadline:
        begun_s = time.monotonic()
        statuses[(await http.post(PATH, json=body)).status_code] += 1
        times.append(time.monotonic() - begun_s)
    return times, statuses


def _times(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e3:.0f} ms (median), {max(times) * 1e3:.0f} ms (longest)"


async def _drop(target: Target, number: int) -> bool:
    """Returns whether the stream had begun."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        body = json.dumps(_body(target, max_tokens=1000, stream=True, ignore_eos=True)).encode()
        headers = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"POST {PATH} HTTP/1.1\r\n{headers}\r\n".encode() + body)
        await writer.drain()
        if number % 2:
            return False
        async with asyncio.timeout(5):
            return bool(await reader.readline())
    except (OSError, TimeoutError):
        return False
    finally:
        writer.transport.abort()


async def _answers(target: Target, name: str, detail: str) -> Finding:
    """Held if it still answers in real time after the attack."""
    async with _client(target) as http:
        begun_s = time.monotonic()
        status = (await http.post(PATH, json=_body(target))).status_code
    took_ms = (time.monotonic() - begun_s) * 1e3
    return Finding(name, status == 200, f"{detail}; a call after that: {status} in {took_ms:.0f} ms")
