"""The gateway's view of an island: its router, and the requests that this gateway has open there.

The router may die. When it is back, open requests are submitted again with the tokens that have been delivered. If its
queue is full by then and it rejects one, the gateway retries until it is accepted: it was accepted before.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from alignedserve.gateway.http.errors import unavailable
from alignedserve.gateway.islands.choice import IslandLoad
from alignedserve.gateway.islands.output_queue import News, OutputQueue
from alignedserve.gateway.islands.pacing import SubmissionPacer
from alignedserve.gateway.telemetry.telemetry import RequestStats
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.connection import RouterConnection, new_epoch, start_of
from alignedserve.protocol.messages import (
    AnyMessage,
    AskCluster,
    Cluster,
    Drain,
    Echo,
    Hello,
    InstanceLimits,
    Load,
    NewTokens,
    PromptProgress,
    Rejected,
    Request,
    ResetPrefixCache,
    Submit,
    Tokens,
    Welcome,
)
from alignedserve.types import InstanceId, RequestKey

# Seconds without a router after which its open requests fail.
PATIENCE_S = 60.0
CLUSTER_TIMEOUT_S = 2.0


@dataclass(eq=False)
class Open:
    """A request that has not ended."""

    request: Request
    tell: Callable[[News], None]
    stats: RequestStats
    delivered: list[int] = field(default_factory=list)
    num_submitted: int = 0

    def told_by(self, outputs: OutputQueue, news: News) -> None:
        outputs.put(self.request, self.stats.owner, self.tell, news)


class IslandClient:
    def __init__(
        self,
        address: RouterAddress,
        me: InstanceId,
        fingerprint: Mapping[str, str],
        on_lost: Callable[[IslandClient], None] = lambda island: None,
        on_drain: Callable[[], None] = lambda: None,
        outputs: OutputQueue | None = None,
        named_like: Callable[[str], str] = lambda adapter: adapter,
    ) -> None:
        """`on_lost` is called when the router is lost: open requests may be moved to another island. `on_drain` is
        called for a Drain. `outputs` is shared by all islands, since a request may move between them. `named_like`
        returns the adapter that is served under this one's name now."""
        epoch = new_epoch()
        started_s = start_of(epoch)
        hello = Hello(
            "gateway", me, epoch, os.getpid(), dict(fingerprint), InstanceLimits(), started_s=started_s
        )
        self.address = address
        self._link = RouterConnection(address, lambda: hello, self)
        self._pacing = SubmissionPacer(self._link.send, self._later)
        # This event is pulsed when `has_room` may have changed.
        self._changed = asyncio.Event()
        self._on_lost = on_lost
        self._on_drain = on_drain
        self._outputs = outputs or OutputQueue()
        self._named_like = named_like
        self._open: dict[RequestKey, Open] = {}
        # Stats of requests closed here, until the router reports their timeline.
        self._leaving: dict[RequestKey, RequestStats] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._tickets = itertools.count(1)
        self._giving_up: asyncio.TimerHandle | None = None
        # Whether the router has been away for more than PATIENCE_S.
        self.is_given_up = False
        # Whether this island is being retired: it gets new requests only if there is no other.
        self.is_leaving = False
        self.island_load = IslandLoad()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def is_up(self) -> bool:
        return self._link.is_up

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._open

    @property
    def has_room(self) -> bool:
        """Whether a best-effort request may be opened now: it is submitted soon, or it fails at once."""
        return self.is_given_up or (self.is_up and self._pacing.has_room)

    async def until_changed(self) -> None:
        """Returns when `has_room` may have changed."""
        await self._changed.wait()

    async def run(self) -> None:
        """Runs until the router sends Stop."""
        self._start_giving_up()
        try:
            await self._link.run()
        finally:
            self._give_up("this server is stopping")

    def stop(self) -> None:
        self._link.stop()

    def open(self, request: Request, tell: Callable[[News], None], stats: RequestStats) -> None:
        """Opens a request. `tell` is called with its tokens, each once and in order, until it ends or is closed. Raises
        ApiError if the router was given up."""
        if self.is_given_up:
            raise unavailable("the router is down")
        stats.opened()
        self.adopt(Open(request, tell, stats))

    def adopt(self, entry: Open) -> None:
        self._open[entry.request.key] = entry
        if not self.is_up:
            return
        if entry.request.tier == "rt":
            self._submit(entry)
        else:
            self._submit_in_turn(entry)

    def take_all(self) -> list[Open]:
        """Removes and returns all open requests."""
        taken, self._open = list(self._open.values()), {}
        return taken

    def close(self, key: RequestKey, reason: str) -> None:
        """Ends a request that no client waits for any more. Safe to repeat."""
        if entry := self._open.pop(key, None):
            is_known = self.is_up and self._pacing.abort(key)
            entry.stats.ended(reason, is_told=not is_known)
            if is_known:
                self._leaving[key] = entry.stats

    async def cluster(self) -> Cluster:
        """Returns the state of the island's processes. Raises ApiError if the router does not answer."""
        found: Cluster = await self._answer(AskCluster)
        return found

    async def reset_prefix_cache(self) -> None:
        """Returns when no further request gets KV that is kept now. Raises ApiError if the router does not answer."""
        await self._answer(ResetPrefixCache)

    async def _answer(self, question: Callable[[int], AskCluster | ResetPrefixCache]) -> Any:
        if not self.is_up:
            raise unavailable("the router is down")
        ticket = next(self._tickets)
        self._asked[ticket] = asyncio.get_running_loop().create_future()
        self._link.send(question(ticket))
        try:
            return await asyncio.wait_for(self._asked[ticket], CLUSTER_TIMEOUT_S)
        except TimeoutError:
            raise unavailable("the router does not answer") from None
        finally:
            del self._asked[ticket]

    # ---- callbacks of RouterConnection ----

    def on_up(self, welcome: Welcome) -> None:
        self.is_given_up = False
        if self._giving_up:
            self._giving_up.cancel()
        for entry in sorted(self._open.values(), key=lambda entry: entry.request.tier != "rt"):
            self._submit_in_turn(entry)
        self._pulse()

    def on_down(self) -> None:
        self.island_load = IslandLoad()
        self._pacing.forget()
        self._let_go()
        self._on_lost(self)
        self._start_giving_up()
        self._pulse()

    def on_message(self, message: AnyMessage) -> None:
        match message:
            case Tokens(news=all_news, progress=progress, timelines=timelines):
                now = time.monotonic()
                for each in progress:
                    self._progress(each)
                for key, timeline in timelines.items():
                    if key in self._open:
                        self._open[key].stats.timeline = timeline
                    elif stats := self._leaving.pop(key, None):
                        stats.told(timeline)
                for news in all_news:
                    self._news(news, now)
            case Rejected():
                self._rejected(message)
            case Echo():
                self._pacing.answered(message)
            case Load():
                self.island_load.hear(message)
            case Drain():
                self._on_drain()
            case Cluster(ticket=ticket) | ResetPrefixCache(ticket=ticket):
                if ticket in self._asked and not self._asked[ticket].done():
                    self._asked[ticket].set_result(message)

    # ---- requests ----

    def _submit_in_turn(self, entry: Open) -> None:
        self._pacing.submit(entry.request.key, functools.partial(self._submit, entry))

    def _submit(self, entry: Open) -> None:
        entry.stats.submitted(is_again=entry.num_submitted > 0)
        entry.num_submitted += 1
        stats = entry.stats
        waited_s = time.monotonic() - stats.begun_s
        self._link.send(Submit(entry.request, list(entry.delivered), stats.predicted_len, waited_s))

    def _progress(self, progress: PromptProgress) -> None:
        # A router that comes back repeats the progress of prompts that already have tokens.
        if (entry := self._open.get(progress.key)) and not entry.delivered:
            entry.told_by(self._outputs, progress)

    def _news(self, news: NewTokens, now: float) -> None:
        entry = self._open.get(news.key)
        if entry is None:
            return
        num_known = len(entry.delivered) - news.first
        if num_known < 0:
            raise RuntimeError(
                f"request {news.key}: {len(entry.delivered)} tokens delivered, the next ones come after {news.first}"
            )
        if num_known:
            news = msgspec.structs.replace(
                news,
                first=len(entry.delivered),
                tokens=news.tokens[num_known:],
                logprobs=news.logprobs[num_known:],
                prompt_logprobs=b"",
                num_reused=0,
            )
        if news.tokens:
            entry.delivered += news.tokens
            entry.stats.tokens(len(news.tokens), now)
        if news.embedding:
            entry.stats.embedded(now)
        if news.finish_reason:
            del self._open[news.key]
            entry.stats.ended(news.finish_reason)
        entry.told_by(self._outputs, news)

    def _rejected(self, rejected: Rejected) -> None:
        if stats := self._leaving.pop(rejected.key, None):
            stats.told()
        entry = self._open.get(rejected.key)
        if entry is None:
            return
        if (wait_s := rejected.wait_s(entry.num_submitted)) is not None:
            asyncio.get_running_loop().call_later(wait_s, self._submit_again, entry, entry.num_submitted)
            return
        if rejected.reason == "adapter" and not entry.delivered:
            adapter = self._named_like(entry.request.adapter)
            if adapter != entry.request.adapter:
                # It was replaced while the body was being prepared.
                entry.request = msgspec.structs.replace(entry.request, adapter=adapter)
                entry.num_submitted = 0
                self._submit_in_turn(entry)
                return
        del self._open[rejected.key]
        entry.stats.rejected(rejected.reason)
        entry.told_by(self._outputs, rejected)

    def _submit_again(self, entry: Open, num_submitted: int) -> None:
        """Submits the request again, unless it was submitted to another router meanwhile."""
        is_last = entry.num_submitted == num_submitted
        if self._open.get(entry.request.key) is entry and is_last and self.is_up:
            self._submit_in_turn(entry)

    # ---- a router that does not come back ----

    def _let_go(self) -> None:
        """Forgets the closed requests: the router that had their timelines is gone."""
        leaving, self._leaving = self._leaving, {}
        for stats in leaving.values():
            stats.told()

    def _start_giving_up(self) -> None:
        loop = asyncio.get_running_loop()
        self._giving_up = loop.call_later(PATIENCE_S, self._give_up, "the router is down")

    def _give_up(self, reason: str) -> None:
        self.is_given_up = True
        if self._giving_up:
            self._giving_up.cancel()
        self._pulse()
        for entry in self.take_all():
            entry.stats.ended("error")
            key, num_tokens = entry.request.key, len(entry.delivered)
            entry.told_by(self._outputs, NewTokens(key, num_tokens, [], finish_reason="error", error=reason))

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        def now() -> None:
            then()
            self._pulse()

        asyncio.get_running_loop().call_later(seconds, now)

    def _pulse(self) -> None:
        self._changed.set()
        self._changed.clear()
