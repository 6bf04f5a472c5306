"""Floods by one key, and by clients without one, while another key makes small calls.

They take turns: some seconds without the flood, some with it, and again. So other load on the machine slows both."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections import Counter
from itertools import chain

import httpx2

from benchmarks.attack.target import KEYS, MAX_CONNECTIONS, Finding, Target

NEEDS_KEYS = True
ATTACKER, VICTIM = KEYS
UNKNOWN = "a-key-that-nobody-has-given"
NUM_ROUNDS, WINDOW_S = 2, 3.0
# The flood goes on while the window's last call is answered.
FLOOD_S = 1.5 * WINDOW_S


async def attack_cancels(target: Target) -> Finding:
    """Sends calls with a long prompt, and hangs up after up to 20 ms."""
    return await _flooded(target, "cancels", ATTACKER)


async def attack_cancels_without_a_key(target: Target) -> Finding:
    return await _flooded(target, "cancels", UNKNOWN)


async def attack_connections(target: Target) -> Finding:
    """Opens 3,000 connections, which is three times what the server accepts, and sends nothing."""
    return await _flooded(target, "connections", UNKNOWN, MAX_CONNECTIONS)


async def attack_calls(target: Target) -> Finding:
    """Makes calls on 32 threads."""
    return await _flooded(target, "calls", ATTACKER)


async def attack_choices(target: Target) -> Finding:
    """Makes calls with 256 choices of 400 tokens each."""
    return await _flooded(target, "choices", ATTACKER)


async def attack_sessions(target: Target) -> Finding:
    """Makes calls that announce a next turn, each of a session of its own."""
    return await _flooded(target, "sessions", ATTACKER)


async def attack_schemas(target: Target) -> Finding:
    """Makes calls each with a new schema of 40 properties."""
    return await _flooded(target, "schemas", ATTACKER)


async def _flooded(target: Target, kind: str, key: str, least: int = 1) -> Finding:
    """Held if each of the other key's calls gets its answer, while `least` were sent in each round."""
    calm, flooded, first = list[list[float]](), list[float](), list[float]()
    statuses, sent = Counter[str](), list[str]()
    headers = {"Authorization": f"Bearer {VICTIM}", "Connection": "close"}
    async with httpx2.AsyncClient(base_url=target.url, timeout=20 * target.slack, headers=headers) as http:
        for _ in range(NUM_ROUNDS):
            calm.append(await _calls(http, target, WINDOW_S, Counter()))
            flood = await _started(target, kind, key)
            flooded += await _calls(http, target, WINDOW_S, statuses)
            sent.append((await flood.communicate())[0].decode().strip())
            first += await _calls(http, target, 0.0, statuses)
    before, *after = calm
    windows = {
        "before": before,
        "during": flooded,
        "first after hanging up": first,
        "after": [*chain(*after)],
    }
    took = ", ".join(
        f"{name} {statistics.median(times) * 1e3:.0f} ms (at most {max(times) * 1e3:.0f}, {len(times)} calls)"
        for name, times in windows.items()
    )
    detail = f"flood: {', '.join(sent)}; first token {took}; {dict(statuses)}"
    ratio = statistics.median(flooded) / statistics.median(chain(*calm))
    is_flooded = min(int(each.split()[0]) for each in sent) >= least
    return Finding(kind, is_flooded and statuses.keys() == {"200"}, detail, ratio)


async def _started(target: Target, kind: str, key: str) -> asyncio.subprocess.Process:
    """Returns the process of the flood, which ends by itself, once it has begun."""
    words = ("-m", "benchmarks.attack.flooder", kind, target.host, str(target.port), key, str(FLOOD_S))
    flood = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    await asyncio.sleep(0.5)
    return flood


async def _calls(
    http: httpx2.AsyncClient, target: Target, seconds: float, statuses: Counter[str]
) -> list[float]:
    """Makes calls of a token one after the other, at least one. Returns the seconds of each, and counts how they ended.
    Further tokens would take as long as an iteration, which a full batch makes longer by itself."""
    body = {"model": target.model, "prompt": "Count from 1 to 9.", "max_tokens": 1}
    times, deadline = list[float](), time.monotonic() + seconds
    while not times or time.monotonic() < deadline:
        begun_s = time.monotonic()
        try:
            status = str((await http.post("/v1/completions", json=body)).status_code)
        except httpx2.HTTPError as error:
            status = type(error).__name__
        statuses[status] += 1
        times.append(time.monotonic() - begun_s)
    return times
