"""One call for embeddings: a request to the router for each of its inputs, a bounded number of them at a time. What the
calls of one owner have open in real time is bounded together: eight calls of 2,048 texts kept a chat from its first
token for eight seconds."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from weakref import WeakKeyDictionary

from alignedserve.gateway.generation.generation import NUM_AT_ONCE, NUM_TOKENS_AT_ONCE, new_key, rejection
from alignedserve.gateway.generation.service import Service
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.islands import Islands
from alignedserve.gateway.output_queue import News
from alignedserve.process.logs import request_id
from alignedserve.protocol.messages import PromptProgress, Rejected, Request
from alignedserve.protocol.pooling import NO_SAMPLING
from alignedserve.types import RequestKey

# So many requests of an owner's calls are open at once in real time, and of each call of best effort: enough for
# instances to have work, and few enough for others to have room in the router's queue, and to be computed soon.
MAX_OPEN = 4 * NUM_AT_ONCE
# The number of requests in real time that are open, by owner; of each gateway.
_in_real_time: WeakKeyDictionary[Islands, Counter[str]] = WeakKeyDictionary()


@dataclass(eq=False)
class Embedding:
    islands: Islands
    prompts: Sequence[list[int]]
    # One of POOLINGS.
    pooling: str
    service: Service
    # See messages.Request.
    cache_salt: str = ""
    adapter: str = ""
    # That of the call's key.
    owner: str = ""
    _open: dict[int, RequestKey] = field(default_factory=dict)
    _num_begun: int = 0
    _news: asyncio.Queue[tuple[int, News]] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        # That of all calls in real time, or its own.
        is_real_time = self.service.tier == "rt"
        self._num_open = _in_real_time.setdefault(self.islands, Counter()) if is_real_time else Counter()

    async def vectors(self) -> list[bytes]:
        """Returns the embedding of each prompt, in order. Raises ApiError as soon as one can't be had; `close` then
        ends the others."""
        found = [b""] * len(self.prompts)
        while self._open or self._num_begun < len(self.prompts):
            while self._num_begun < len(self.prompts) and self._has_room:
                await self._begin_some()
            index, news = await self._news.get()
            if isinstance(news, Rejected):
                raise rejection(news, "input")
            if isinstance(news, PromptProgress) or news.finish_reason is None:
                # A router that was known before says again what it has said, which is nothing yet.
                continue
            if not news.embedding:
                raise ApiError(500, f"embedding failed: {news.error or news.finish_reason}")
            found[index] = news.embedding
            del self._open[index]
            self._num_open[self.owner] -= 1
        return found

    def close(self) -> None:
        """Aborts the requests that have not ended. Safe to repeat."""
        keys = [*self._open.values()]
        self._open.clear()
        self._num_open[self.owner] -= len(keys)
        if not self._num_open[self.owner]:
            del self._num_open[self.owner]
        self.islands.close_all(keys)

    @property
    def _has_room(self) -> bool:
        """Each call may have some open, whatever the others have: when these end, it looks again."""
        return not self._open or self._num_open[self.owner] <= MAX_OPEN - NUM_AT_ONCE

    async def _begin_some(self) -> None:
        """Raises ApiError when there is no router."""
        async with self.islands.opening(self.service.tier) as turn:
            if self._num_begun or self.service.tier != "rt":
                await turn()
            num_tokens = 0
            # A call that has none open begins one, whatever the others have.
            most = max(1, min(NUM_AT_ONCE, MAX_OPEN - self._num_open[self.owner]))
            for prompt in islice(self.prompts, self._num_begun, self._num_begun + most):
                self._begin()
                num_tokens += len(prompt)
                if num_tokens > NUM_TOKENS_AT_ONCE:
                    break

    def _begin(self) -> None:
        index, service = self._num_begun, self.service
        request = Request(
            key=new_key(),
            prompt=self.prompts[index],
            params=NO_SAMPLING,
            seed=0,
            arrival_s=time.monotonic(),
            ttft_s=service.ttft_s,
            tier=service.tier,
            deadline_s=service.deadline_s,
            request_id=request_id.get() or "",
            slo_defaults=[name for name in service.slo_defaults if name == "ttft_s"],
            cache_salt=self.cache_salt,
            pooling=self.pooling,
            adapter=self.adapter,
        )
        self._num_begun += 1
        self._open[index] = request.key
        self._num_open[self.owner] += 1
        self.islands.open(request, lambda news: self._news.put_nowait((index, news)))
