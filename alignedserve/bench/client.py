"""Sends requests to a server and records when answers arrive.

The loop is open: requests are sent when they are due, however slow the server is.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx2

from alignedserve.bench.config import BenchConfig
from alignedserve.bench.workload import Item
from alignedserve.protocol.sse import EventReader

MAX_ERROR_CHARS = 500
SERVICE_TIERS = {"rt": "default", "be": "flex"}


@dataclass
class RequestOutcome:
    """The outcome of one request. Times are seconds from the start of the run."""

    tier: str
    due_s: float
    # When it was sent: later than due if concurrency is limited or the client is too slow.
    start_s: float = 0.0
    # When each piece of text arrived.
    times_s: list[float] = field(default_factory=list)
    text: str = ""
    prompt_len: int = 0
    # Output tokens; 0 if the server did not report them.
    output_len: int = 0
    # Why there is no complete answer; None if there is one.
    error: str | None = "not sent"
    # Whether the answer is correct; None if that is unknown.
    is_right: bool | None = None


class Client:
    def __init__(self, config: BenchConfig, http: httpx2.AsyncClient, model: str) -> None:
        self._config = config
        self._http = http
        self._model = model
        self._begun_s = time.perf_counter()

    async def run(
        self, items: Sequence[Item], tell: Callable[[RequestOutcome], object] = lambda outcome: None
    ) -> tuple[list[RequestOutcome], float]:
        """Sends all requests in the order of their due times. Returns their outcomes and the duration in seconds.

        `tell` is called with each outcome when its request ends.
        """
        limit = self._config.max_concurrency
        gate = asyncio.Semaphore(limit) if limit else nullcontext()
        self._begun_s = time.perf_counter()

        async def ask(item: Item) -> RequestOutcome:
            async with gate:
                outcome = await self._ask(item)
            tell(outcome)
            return outcome

        asking = []
        async with asyncio.TaskGroup() as group:
            for item in sorted(items, key=lambda item: item.due_s):
                if (wait_s := item.due_s - self._now()) > 0:
                    await asyncio.sleep(wait_s)
                asking.append(group.create_task(ask(item)))
        return [task.result() for task in asking], self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._begun_s

    async def _ask(self, item: Item) -> RequestOutcome:
        outcome = RequestOutcome(item.tier, item.due_s, prompt_len=item.prompt_len)
        outcome.start_s = self._now()
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                outcome.error = await self._stream(item, outcome)
        except TimeoutError:
            outcome.error = f"not complete after {self._config.request_timeout_s} s"
        except httpx2.HTTPError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        if outcome.error is None and item.answer is not None:
            outcome.is_right = outcome.text.strip() == item.answer
        return outcome

    async def _stream(self, item: Item, outcome: RequestOutcome) -> str | None:
        """Streams the answer. Returns why it failed, or None."""
        asked = self._body(item)
        async with self._http.stream("POST", self._config.url + self._config.path, json=asked) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                return f"HTTP {response.status_code}: {text[:MAX_ERROR_CHARS]}"
            async for event in _events(response):
                if event == b"[DONE]":
                    return None
                if error := self._take(event, outcome):
                    return error
        return "the stream ended without [DONE]"

    def _body(self, item: Item) -> dict[str, Any]:
        config = self._config
        is_chat = isinstance(item.prompt, list) and bool(item.prompt) and isinstance(item.prompt[0], dict)
        body: dict[str, Any] = {
            "model": self._model,
            "messages" if is_chat else "prompt": item.prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if item.max_tokens is not None:
            body["max_tokens"] = item.max_tokens
        if config.sent_temperature is not None:
            body["temperature"] = config.sent_temperature
        if config.ignore_eos:
            body["ignore_eos"] = True
        if config.be_share:
            # Omitted in runs without best effort, for servers that have no tiers.
            body["service_tier"] = SERVICE_TIERS[item.tier]
        return body

    def _take(self, event: bytes, outcome: RequestOutcome) -> str | None:
        try:
            chunk = json.loads(event)
        except ValueError:
            return f"an event is not JSON: {event[:MAX_ERROR_CHARS]!r}"
        if not isinstance(chunk, dict):
            return f"an event is not an object: {event[:MAX_ERROR_CHARS]!r}"
        if "error" in chunk:
            return str(chunk["error"])[:MAX_ERROR_CHARS]
        if usage := chunk.get("usage"):
            outcome.prompt_len = usage.get("prompt_tokens", outcome.prompt_len)
            outcome.output_len = usage.get("completion_tokens", outcome.output_len)
        for choice in chunk.get("choices", []):
            delta = choice.get("delta", choice)
            text = delta.get("content") or delta.get("text") or delta.get("reasoning_content")
            if text:
                outcome.times_s.append(self._now())
                outcome.text += text
        return None


async def _events(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Yields the data of server-sent events."""
    reader = EventReader()
    async for data in response.aiter_bytes():
        for event in reader.feed(data):
            yield event


async def first_model(http: httpx2.AsyncClient, url: str) -> str:
    """Returns the server's first model. Raises ValueError if there is no server or no model."""
    try:
        response = await http.get(f"{url}/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, LookupError) as error:
        raise ValueError(f"{url}: lists no models ({type(error).__name__}: {error}); is it up?") from None
