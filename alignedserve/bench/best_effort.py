"""Best-effort load beside a run: a batch job or, on a server without a batch API, plain requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Protocol

import httpx2

ENDPOINT = "/v1/chat/completions"
# Status codes of servers that have no Files and Batches API.
_NO_SUCH_API = (404, 405, 501)
_OVER = ("failed", "completed", "expired", "cancelled")
_MAX_ERROR_CHARS = 300


class BestEffort(Protocol):
    """Load that runs until it is stopped or has ended."""

    async def num_done(self) -> int:
        """Returns the number of answered lines. Raises ValueError if the load has failed."""

    async def is_going_on(self) -> bool:
        """Returns whether there are lines that were neither answered nor refused."""

    async def stop(self) -> None:
        """Stops the load. Safe to repeat."""


async def start_best_effort(
    http: httpx2.AsyncClient, url: str, bodies: Sequence[dict[str, Any]], concurrency: int
) -> tuple[BestEffort, bool]:
    """Starts the load, and returns it and whether it is a batch job. `concurrency`: open plain requests.

    Raises ValueError if the server refuses the job.
    """
    job = await _start_job(http, url, bodies)
    if job is not None:
        return job, True
    return PlainRequests(http, url, bodies, concurrency), False


async def _start_job(http: httpx2.AsyncClient, url: str, bodies: Sequence[dict[str, Any]]) -> BatchJob | None:
    """Returns None if the server has no batch API."""
    common = {"method": "POST", "url": ENDPOINT}
    lines = [{"custom_id": str(number), **common, "body": body} for number, body in enumerate(bodies)]
    content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    uploaded = await http.post(
        f"{url}/v1/files", data={"purpose": "batch"}, files={"file": ("compare.jsonl", content)}
    )
    if uploaded.status_code in _NO_SUCH_API:
        return None
    asked = {"input_file_id": _checked(uploaded)["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    created = await http.post(f"{url}/v1/batches", json=asked)
    return None if created.status_code in _NO_SUCH_API else BatchJob(http, url, _checked(created)["id"])


class BatchJob:
    def __init__(self, http: httpx2.AsyncClient, url: str, batch_id: str) -> None:
        self._http = http
        self._url = f"{url}/v1/batches/{batch_id}"

    async def is_going_on(self) -> bool:
        return _checked(await self._http.get(self._url))["status"] not in _OVER

    async def num_done(self) -> int:
        batch = _checked(await self._http.get(self._url))
        if batch["status"] == "failed":
            problems = (batch.get("errors") or {}).get("data") or [{"message": "the job has failed"}]
            raise ValueError(f"{self._url}: {problems[0]['message']}")
        return int((batch.get("request_counts") or {}).get("completed", 0))

    async def stop(self) -> None:
        batch = _checked(await self._http.get(self._url))
        if batch["status"] not in _OVER:
            await self._http.post(f"{self._url}/cancel")


class PlainRequests:
    """Sends the lines as requests without a stream, a fixed number at a time."""

    def __init__(
        self, http: httpx2.AsyncClient, url: str, bodies: Sequence[dict[str, Any]], concurrency: int
    ) -> None:
        self._http = http
        self._url = url
        self._left = iter(bodies)
        self._num_done = 0
        self._error: str | None = None
        self._senders = [asyncio.create_task(self._send()) for _ in range(concurrency)]

    async def num_done(self) -> int:
        if self._error and not self._num_done:
            raise ValueError(self._error)
        return self._num_done

    async def is_going_on(self) -> bool:
        return any(not sender.done() for sender in self._senders)

    async def stop(self) -> None:
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)

    async def _send(self) -> None:
        for body in self._left:
            try:
                _checked(await self._http.post(f"{self._url}{ENDPOINT}", json=body))
                self._num_done += 1
            except (httpx2.HTTPError, ValueError) as error:
                self._error = str(error) or type(error).__name__


def _checked(answer: httpx2.Response) -> dict[str, Any]:
    """Returns the answer's JSON. Raises ValueError if it is an error or no JSON object."""
    if answer.is_error:
        raise ValueError(f"{answer.url}: HTTP {answer.status_code}: {answer.text[:_MAX_ERROR_CHARS]}")
    found = answer.json()
    if not isinstance(found, dict):
        raise ValueError(f"{answer.url}: the answer is not an object")
    return found
