"""One call for embeddings: a request to the router for each of its inputs, a bounded number of them at a time. What the
calls of one owner have open in real time is bounded together: eight calls of 2,048 texts kept a chat from its first
token for eight seconds."""

from __future__ import annotations

import asyncio
import time
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

# The most requests that an owner's calls have open together in real time, and each call of best effort: enough for
# instances to have work, and few enough for others to have room in the router's queue, and to be computed soon. A call
# that comes when others have all of these opens a few more, its share of NUM_AT_ONCE: so n calls have
# NUM_AT_ONCE * (1/2 + 1/3 + ... + 1/n) more of them open, at most, or one for each.
MAX_OPEN = 4 * NUM_AT_ONCE


@dataclass
class _Calls:
    """Calls that share what they have open."""

    num_calls: int = 0
    # The number of calls that have requests left to begin.
    num_beginning: int = 0
    # The number of their requests that are open.
    num_open: int = 0

    @property
    def share(self) -> int:
        """A call with this many open requests begins no more."""
        return max(1, MAX_OPEN // max(1, self.num_beginning))

    @property
    def least(self) -> int:
        """The number of requests that each call may have open, whatever the others have."""
        return max(1, NUM_AT_ONCE // max(1, self.num_calls))


# The calls in real time, by owner; of each gateway.
_in_real_time: WeakKeyDictionary[Islands, dict[str, _Calls]] = WeakKeyDictionary()


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

    _calls: _Calls | None = None
    # Whether it counts among those that have requests left to begin.
    _is_beginning: bool = False

    async def vectors(self) -> list[bytes]:
        """Returns the embedding of each prompt, in order. Raises ApiError as soon as one can't be had; `close` then
        ends the others."""
        found, calls = [b""] * len(self.prompts), self._joined()
        while self._open or self._num_begun < len(self.prompts):
            while self._num_begun < len(self.prompts) and self._has_room(calls):
                await self._begin_some(calls)
            if self._num_begun == len(self.prompts):
                self._begins_no_more(calls)
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
            calls.num_open -= 1
        return found

    def close(self) -> None:
        """Aborts the requests that have not ended. Safe to repeat."""
        keys = [*self._open.values()]
        self._open.clear()
        if calls := self._calls:
            self._calls = None
            calls.num_open -= len(keys)
            self._begins_no_more(calls)
            calls.num_calls -= 1
            if self.service.tier == "rt" and not calls.num_calls:
                del _in_real_time[self.islands][self.owner]
        self.islands.close_all(keys)

    def _joined(self) -> _Calls:
        """Returns the calls among which this one is: its owner's in real time, or itself."""
        calls = _Calls()
        if self.service.tier == "rt":
            calls = _in_real_time.setdefault(self.islands, {}).setdefault(self.owner, calls)
        calls.num_calls += 1
        calls.num_beginning += 1
        self._calls, self._is_beginning = calls, True
        return calls

    def _begins_no_more(self, calls: _Calls) -> None:
        calls.num_beginning -= self._is_beginning
        self._is_beginning = False

    def _has_room(self, calls: _Calls) -> bool:
        """Whether some more may be begun: few at a time would cost more."""
        if len(self._open) <= calls.least // 2:
            return True
        return calls.num_open <= MAX_OPEN - NUM_AT_ONCE and len(self._open) < calls.share

    async def _begin_some(self, calls: _Calls) -> None:
        """Raises ApiError when there is no router."""
        async with self.islands.opening(self.service.tier) as turn:
            if self._num_begun or self.service.tier != "rt":
                await turn()
            num_tokens = 0
            left = max(MAX_OPEN - calls.num_open, calls.least - len(self._open))
            # It had room before it waited for its turn, and others may have taken that.
            most = max(1, min(NUM_AT_ONCE, left))
            for prompt in islice(self.prompts, self._num_begun, self._num_begun + most):
                self._begin(calls)
                num_tokens += len(prompt)
                if num_tokens > NUM_TOKENS_AT_ONCE:
                    break

    def _begin(self, calls: _Calls) -> None:
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
        calls.num_open += 1
        self.islands.open(request, lambda news: self._news.put_nowait((index, news)))
