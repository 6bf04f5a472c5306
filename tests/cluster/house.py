"""An island behind a gateway, for clients that disconnect.

A test chooses the instances and the states in which its requests should be.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import httpx2
import pytest

from alignedserve.types import InstanceId
from tests.cluster.processes import GATEWAY, POOL, ROUTER, Processes

# Three of four of these have room in the pool, and one of two on a decode instance.
NUM_PROMPT = 300
ASK_S = 0.02
# The seconds that processes may take to start, and requests to reach their state.
PATIENCE_S = 60.0
# The seconds after which nothing may be left of a request. An answer that goes on takes twice as long
# (`part.SLOWEST_ITERATION_S`), so only an abort can end it in time.
GONE_S = 20.0

States = dict[str, int]
_numbers = count(1)


class House:
    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        port = processes.configs[GATEWAY].http.port
        self.http = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)

    async def have(self, *instances: InstanceId) -> None:
        """Waits until these instances and everything else needed are up, and no others."""
        wanted = {ROUTER, POOL, GATEWAY, *instances}
        self.processes.remove(*(self.processes.names - wanted))
        self.processes.start(*(wanted - self.processes.names))
        await self._until(lambda cluster: _up(cluster) == wanted)

    def ask(self, *, is_stream: bool, num_prompt: int = NUM_PROMPT, **options: Any) -> asyncio.Task[None]:
        """Starts its own client, which disconnects when it is cancelled. No other client's prompt begins the same
        way."""
        prompt = [*divmod(next(_numbers), 50), *(number % 50 for number in range(num_prompt - 2))]
        body = {"prompt": prompt, "max_tokens": 80, "ignore_eos": True, "stream": is_stream, "logprobs": 0}
        return asyncio.create_task(self._ask(body | options))

    async def until(self, states: States) -> None:
        """Waits until each of these states has this number of requests, and no other state has any."""
        await self._until(lambda cluster: cluster["requests"] == states)

    async def until_empty(self) -> None:
        await self._until(_is_empty)

    async def check_gone(self, asking: asyncio.Task[None]) -> None:
        """Disconnects the client and checks that everything it held is freed."""
        assert not asking.done(), asking
        asking.cancel()
        left_s = time.monotonic()
        await self.until_empty()
        took_s = time.monotonic() - left_s
        print(f"nothing left after {took_s:.2f} s")
        assert took_s < GONE_S
        with pytest.raises(asyncio.CancelledError):
            await asking

    async def _ask(self, body: dict[str, Any]) -> None:
        async with (
            httpx2.AsyncClient(base_url=self.http.base_url, timeout=PATIENCE_S) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for line in response.aiter_lines():
                assert "error" not in line, line
        raise AssertionError("it was answered before it could go away")

    async def _until(self, is_so: Callable[[dict[str, Any]], object]) -> None:
        deadline, found = time.monotonic() + PATIENCE_S, None
        while found is None or not is_so(found):
            assert time.monotonic() < deadline, found
            await asyncio.sleep(ASK_S)
            found = await self._cluster()

    async def _cluster(self) -> dict[str, Any] | None:
        """Returns None while the gateway or the router is not up yet."""
        try:
            answer = await self.http.get("/v1/cluster")
        except httpx2.ConnectError:
            return None
        found: dict[str, Any] = answer.json()
        return found if answer.status_code == 200 else None


@asynccontextmanager
async def opened(processes: Processes, *instances: InstanceId) -> AsyncIterator[House]:
    """Opens a house with these instances and everything else needed."""
    house = House(processes)
    async with house.http:
        await house.have(*instances)
        yield house


def _up(cluster: dict[str, Any]) -> set[InstanceId]:
    return {InstanceId(each["instance_id"]) for each in cluster["processes"] if each["state"] == "up"}


def _is_empty(cluster: dict[str, Any]) -> bool:
    used = [each["blocks"]["used"] for each in cluster["processes"] if each["state"] == "up"]
    return not cluster["requests"] and not any(used)
