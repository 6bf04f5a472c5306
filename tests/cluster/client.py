"""A gateway without HTTP: it submits requests over time, stores what it receives, and asks the router for its state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.islands.island import IslandClient
from alignedserve.gateway.islands.output_queue import News
from alignedserve.gateway.telemetry.telemetry import Telemetry
from alignedserve.protocol.messages import AnyMessage, Cluster, NewTokens, PromptProgress, Request, Tokens
from alignedserve.protocol.prompt_logprobs import TokenLogprobs, unpack
from tests.cluster.processes import GATEWAY, Processes

TIMEOUT_S = 120.0
ASK_S = 0.05


@dataclass(eq=False)
class Stream:
    """What a client would receive."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    progress: list[PromptProgress] = field(default_factory=list)

    def hear(self, news: News) -> None:
        if isinstance(news, PromptProgress):
            assert self.request.reports_progress and not self.tokens, f"after its first token: {news}"
            self.progress.append(news)
            return
        assert isinstance(news, NewTokens), f"rejected: {news}"
        assert news.error is None, news
        assert self.finish_reason is None, f"after its end: {news}"
        self.tokens += news.tokens
        self.logprobs += news.logprobs
        if news.prompt_logprobs:
            assert self.prompt_logprobs is None, f"said again: {news}"
            self.prompt_logprobs = [each for part in unpack(news.prompt_logprobs) for each in part]
        self.finish_reason = news.finish_reason


class Client(IslandClient):
    def __init__(self, processes: Processes) -> None:
        super().__init__(processes.router, GATEWAY, {})
        self.processes = processes
        self.streams: list[Stream] = []
        self._telemetry = Telemetry()
        # In the order received, including those repeated after a router's death.
        self.heard: list[NewTokens] = []
        self._changed = asyncio.Event()

    def on_message(self, message: AnyMessage) -> None:
        if isinstance(message, Tokens):
            self.heard += message.news
        super().on_message(message)
        self._changed.set()

    @property
    def num_tokens(self) -> int:
        return sum(len(stream.tokens) for stream in self.streams)

    def submit(self, request: Request) -> Stream:
        stream = Stream(msgspec.structs.replace(request, arrival_s=time.monotonic()))
        self.streams.append(stream)
        self.open(stream.request, stream.hear, self._telemetry.opened(stream.request))
        return stream

    async def until(self, is_so: Callable[[], object]) -> None:
        """Checks the condition whenever something is received."""
        async with asyncio.timeout(TIMEOUT_S):
            while not is_so():
                self._changed.clear()
                await self._changed.wait()

    async def until_cluster(self, is_so: Callable[[Cluster], object]) -> Cluster:
        found = None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not (self.is_up and (found := await self._told()) and is_so(found)):
                    await asyncio.sleep(ASK_S)
        except TimeoutError:
            raise TimeoutError(f"still so after {TIMEOUT_S:g} s: {found}") from None
        return found

    async def _told(self) -> Cluster | None:
        """Returns the router's state, or None if the router dies meanwhile."""
        try:
            return await self.cluster()
        except ApiError:
            return None

    async def until_all_up(self) -> None:
        """Only counts processes that run now, not earlier ones."""
        pids = {name: self.processes.pid(name) for name in self.processes.configs}
        await self.until_cluster(
            lambda cluster: (
                pids.items() <= {process.instance_id: process.pid for process in cluster.processes}.items()
            )
        )

    async def until_idle(self) -> None:
        """Waits until no process has anything left of any request."""
        await self.until_cluster(
            lambda cluster: (
                not cluster.requests
                and all(
                    process.state == "up"
                    and process.num_free_blocks == process.num_blocks
                    and not process.requests
                    for process in cluster.processes
                )
            )
        )

    async def generate(self, requests: Iterable[Request], at_once: int, every: int) -> list[Stream]:
        """Submits `at_once` requests, then one more after every `every` tokens. Returns their streams, which have
        ended."""
        streams: list[Stream] = []
        for number, request in enumerate(requests):
            if number >= at_once:
                enough = self.num_tokens + every
                await self.until(partial(self._has_heard, enough, streams))
            streams.append(self.submit(request))
        await self.until(partial(all_ended, streams))
        return streams

    def _has_heard(self, num_tokens: int, streams: Sequence[Stream]) -> bool:
        return self.num_tokens >= num_tokens or all_ended(streams)


def all_ended(streams: Sequence[Stream]) -> bool:
    return all(stream.finish_reason for stream in streams)


@asynccontextmanager
async def connected(processes: Processes) -> AsyncIterator[Client]:
    """Waits until all processes are up. At the end, everything has to be empty."""
    client = Client(processes)
    # Receiving something impossible ends the block.
    async with asyncio.TaskGroup() as group:
        group.create_task(client.run())
        try:
            await client.until_all_up()
            yield client
            await client.until_all_up()
            await client.until_idle()
        finally:
            client.stop()
