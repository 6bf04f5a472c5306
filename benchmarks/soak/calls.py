"""Calls that are retried while the server can't answer them, as its documentation says."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx2

from benchmarks.soak.faults import FaultLog
from benchmarks.soak.tally import Tally

CALL_S = 240.0
ASK_S = 60.0
AGAIN_S = 0.2


class Unexcused(Exception):
    """A call failed, and no fault excuses it."""


class Calls:
    def __init__(self, url: str, faults: FaultLog, tally: Tally) -> None:
        # One connection per call, because a kept one may belong to a gateway that has died.
        limits = httpx2.Limits(max_keepalive_connections=0)
        self._http = httpx2.AsyncClient(base_url=url, timeout=ASK_S, limits=limits)
        self._faults = faults
        self._tally = tally

    async def close(self) -> None:
        await self._http.aclose()

    async def call(self, method: str, path: str, **what: Any) -> httpx2.Response:
        """Returns any answer that is not a temporary error. Raises Unexcused."""
        give_up_s = time.monotonic() + CALL_S
        while time.monotonic() < give_up_s:
            begin_s = time.monotonic()
            try:
                response = await self._http.request(method, path, **what)
            except httpx2.TransportError as error:
                if not self._faults.excuses_lost(begin_s, time.monotonic()):
                    raise Unexcused(
                        f"{method} {path}: {type(error).__name__} {error} while its gateway lived"
                    ) from None
                self._tally.count_broken(error)
            else:
                if response.status_code < 500 and response.status_code != 408:
                    return response
                if not self._faults.excuses_status(
                    response.status_code, begin_s, time.monotonic(), uses_store=True
                ):
                    raise Unexcused(f"{method} {path}: {response.status_code} {response.text[:300]}")
                self._tally.num_refused += 1
            await asyncio.sleep(AGAIN_S)
        raise Unexcused(f"{method} {path}: no answer within {CALL_S:g} s")

    async def json(self, method: str, path: str, **what: Any) -> Any:
        """Returns the parsed answer. Raises Unexcused, also for any status but 200."""
        response = await self.call(method, path, **what)
        if response.status_code != 200:
            raise Unexcused(f"{method} {path}: {response.status_code} {response.text[:300]}")
        return response.json()
