"""Best-effort load beside a run: a batch job or, on a server without a batch API, plain requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Protocol

import httpx2

ENDPOINT = "/v1/chat/completions"
# Seconds between two looks at a batch, and seconds that a cancelled one may take to end.
_POLL_S, _STOP_S = 0.2, 60.0
# Status codes of servers that have no Files and Batches API.
_NO_SUCH_API = (404, 405, 501)
_OVER = ("failed", "completed", "expired", "cancelled")
_MAX_ERROR_CHARS = 300


class BestEffortLoad(Protocol):
    """Load that runs until it is stopped or has ended."""

    async def num_done(self) -> int:
        """Returns the number of answered lines. Raises ValueError if the load has ended without any."""

    async def is_going_on(self) -> bool:
        """Returns whether there are lines that were neither answered nor refused."""

    async def stop(self) -> None:
        """Stops the load, and deletes its files on the server. Safe to repeat. Raises ValueError if that fails."""


async def start_best_effort(
    http: httpx2.AsyncClient, url: str, bodies: Sequence[dict[str, Any]], concurrency: int
) -> tuple[BestEffortLoad, bool]:
    """Starts the load, and returns it and whether it is a batch job. `concurrency`: open plain requests.

    Raises ValueError if the server refuses the job.
    """
    job = await _start_job(http, url, bodies)
    if job is not None:
        return job, True
    return PlainRequests(http, url, bodies, concurrency), False


async def first_line(load: BestEffortLoad, url: str, timeout_s: float) -> None:
    """Waits until a line is answered, or until the load has ended: a batch job is validated first, and may have to wait
    for others. Raises ValueError."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await load.num_done() and await load.is_going_on():
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise ValueError(f"{url}: best effort got no answer within {timeout_s:g} s") from None


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
    file_id = _checked(uploaded)["id"]
    asked = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    batch_id = None
    try:
        created = await http.post(f"{url}/v1/batches", json=asked)
        if created.status_code in _NO_SUCH_API:
            return None
        batch_id = _checked(created)["id"]
        return BatchJob(http, url, batch_id)
    finally:
        if batch_id is None:
            await _delete_file(http, url, file_id)


async def _delete_file(http: httpx2.AsyncClient, url: str, file_id: str) -> None:
    answer = await http.delete(f"{url}/v1/files/{file_id}")
    # Nothing is left to do for a file that does not exist.
    if answer.status_code != httpx2.codes.NOT_FOUND:
        _checked(answer)


class BatchJob:
    def __init__(self, http: httpx2.AsyncClient, server_url: str, batch_id: str) -> None:
        self._http = http
        self._server_url = server_url
        self._url = f"{server_url}/v1/batches/{batch_id}"

    async def is_going_on(self) -> bool:
        return _checked(await self._http.get(self._url))["status"] not in _OVER

    async def num_done(self) -> int:
        batch = _checked(await self._http.get(self._url))
        if batch["status"] == "failed":
            problems = (batch.get("errors") or {}).get("data") or [{"message": "the job has failed"}]
            raise ValueError(f"{self._url}: {problems[0]['message']}")
        return int((batch.get("request_counts") or {}).get("completed", 0))

    async def stop(self) -> None:
        if await self.is_going_on():
            # It may have ended in the meantime, and is then refused.
            await self._http.post(f"{self._url}/cancel")
        try:
            async with asyncio.timeout(_STOP_S):
                while await self.is_going_on():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise ValueError(f"{self._url}: is still running {_STOP_S:g} s after it was cancelled") from None
        batch = _checked(await self._http.get(self._url))
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if file_id := batch.get(name):
                await _delete_file(self._http, self._server_url, file_id)


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
        if self._error and not self._num_done and not await self.is_going_on():
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
