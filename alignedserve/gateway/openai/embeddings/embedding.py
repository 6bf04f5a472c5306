"""Runs one call for embeddings: a request to the router for each input, with a bounded number of them open at a time.

In real time, the calls of one owner share that bound. Otherwise, eight calls of 2,048 texts delayed the first token of
a chat by eight seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from alignedserve.gateway.generation.call import Call
from alignedserve.gateway.generation.generation import NUM_AT_ONCE, NUM_TOKENS_AT_ONCE, rejection
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.islands.islands import Islands
from alignedserve.gateway.islands.output_queue import News
from alignedserve.protocol.messages import PromptProgress, Rejected
from alignedserve.protocol.pooling import NO_SAMPLING
from alignedserve.types import RequestKey

# Requests that are open at a time, at most, for all real-time calls of an owner together and for each best-effort call.
# That suffices to keep instances busy, and leaves room in the router's queue for others.
#
# A call that arrives when the others have all of these may still open its share of NUM_AT_ONCE. So n calls have at most
# NUM_AT_ONCE * (1/2 + 1/3 + ... + 1/n) more requests open, or one each.
MAX_OPEN = 4 * NUM_AT_ONCE


@dataclass
class _VectorCalls:
    """Calls that share a bound of open requests."""

    num_calls: int = 0
    # The number of calls with requests that are not begun.
    num_beginning: int = 0
    # The number of their open requests.
    num_open: int = 0

    @property
    def share(self) -> int:
        """A call with this number of open requests begins no more."""
        return max(1, MAX_OPEN // max(1, self.num_beginning))

    @property
    def least(self) -> int:
        """The number of requests that each call may have open, regardless of the others."""
        return max(1, NUM_AT_ONCE // max(1, self.num_calls))


# Real-time calls by owner, for each gateway.
_in_real_time: WeakKeyDictionary[Islands, dict[str, _VectorCalls]] = WeakKeyDictionary()


@dataclass(eq=False)
class Embedding:
    # With its service (service.py).
    call: Call[Any]
    islands: Islands
    # The call's prompts, unpacked.
    prompts: Sequence[list[int]]
    _open: dict[int, RequestKey] = field(default_factory=dict)
    _num_begun: int = 0
    _news: asyncio.Queue[tuple[int, News]] = field(default_factory=asyncio.Queue)

    _calls: _VectorCalls | None = None
    # Whether it counts among the calls with requests that are not begun.
    _is_beginning: bool = False

    async def vectors(self) -> list[bytes]:
        """Returns the embedding of each prompt, in order. Raises ApiError as soon as one fails; `close` then ends the
        others."""
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
                # A router that comes back repeats its last report, which has no embedding yet.
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
            if self.call.request.tier == "rt" and not calls.num_calls:
                del _in_real_time[self.islands][self.call.request.owner]
        self.islands.close_all(keys)

    def _joined(self) -> _VectorCalls:
        """Returns the group of this call: the owner's real-time calls, or the call alone."""
        calls = _VectorCalls()
        if self.call.request.tier == "rt":
            calls = _in_real_time.setdefault(self.islands, {}).setdefault(self.call.request.owner, calls)
        calls.num_calls += 1
        calls.num_beginning += 1
        self._calls, self._is_beginning = calls, True
        return calls

    def _begins_no_more(self, calls: _VectorCalls) -> None:
        calls.num_beginning -= self._is_beginning
        self._is_beginning = False

    def _has_room(self, calls: _VectorCalls) -> bool:
        """Whether further requests may be begun. They begin in groups, since single ones would cost more."""
        if len(self._open) <= calls.least // 2:
            return True
        return calls.num_open <= MAX_OPEN - NUM_AT_ONCE and len(self._open) < calls.share

    async def _begin_some(self, calls: _VectorCalls) -> None:
        """Begins some requests. Raises ApiError if there is no router."""
        async with self.islands.opening(self.call.request.tier) as turn:
            if self._num_begun or self.call.request.tier != "rt":
                await turn()
            num_tokens = 0
            left = max(MAX_OPEN - calls.num_open, calls.least - len(self._open))
            # Other calls may have used the room while this one waited for its turn.
            most = max(1, min(NUM_AT_ONCE, left))
            for prompt in islice(self.prompts, self._num_begun, self._num_begun + most):
                self._begin(calls)
                num_tokens += len(prompt)
                if num_tokens > NUM_TOKENS_AT_ONCE:
                    break

    def _begin(self, calls: _VectorCalls) -> None:
        index = self._num_begun
        request = self.call.new_request(self.prompts[index], NO_SAMPLING, seed=0)
        self._num_begun += 1
        self._open[index] = request.key
        calls.num_open += 1
        self.islands.open(request, lambda news: self._news.put_nowait((index, news)))
