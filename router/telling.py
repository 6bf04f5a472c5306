"""What gateways will hear, and when: real time's tokens at once; best effort's, which nobody waits for one by one, some
at a time. To be told of a token costs a gateway CPU time that real time's answers need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from alignedserve.protocol.messages import NewTokens, Tokens
from alignedserve.router.entry import Entry
from alignedserve.types import InstanceId, RequestKey

# Best-effort tokens that are told together. Requests that began at different times have so many at different times.
AT_ONCE = 8
# None waits for longer, but for what is left of a tick.
PATIENCE_S = 0.25


@dataclass(eq=False)
class _Held:
    entry: Entry
    news: NewTokens
    since_s: float


class Telling:
    def __init__(self) -> None:
        # of each gateway: tokens, and the stories of some of the requests
        self._news: dict[InstanceId, Tokens] = {}
        # the oldest first
        self._held: dict[RequestKey, _Held] = {}

    def tell(self, entry: Entry, news: NewTokens, now: float) -> None:
        """A request's next tokens."""
        if held := self._held.get(entry.key):
            news = _both(held.news, news)
        if _is_urgent(entry, news):
            self._held.pop(entry.key, None)
            self._of(entry.gateway).news.append(news)
        elif held:
            held.news = news
        else:
            self._held[entry.key] = _Held(entry, news, now)

    def tell_again(self, entry: Entry, num_known: int) -> None:
        """All that it has beyond what a gateway knows."""
        self._held.pop(entry.key, None)
        self._of(entry.gateway).news.append(NewTokens(entry.key, num_known, entry.output[num_known:]))

    def tell_story(self, entry: Entry) -> None:
        """How it has gone so far, with whatever else its gateway hears."""
        self._of(entry.gateway).timelines[entry.key] = list(entry.timeline)

    def forget(self, key: RequestKey) -> None:
        """Nobody waits for it any more."""
        self._held.pop(key, None)

    def take(self, now: float) -> Iterator[tuple[InstanceId, Tokens]]:
        while self._held and (first := next(iter(self._held.values()))).since_s <= now - PATIENCE_S:
            del self._held[first.entry.key]
            self._of(first.entry.gateway).news.append(first.news)
        news, self._news = self._news, {}
        yield from news.items()

    def _of(self, gateway: InstanceId) -> Tokens:
        return self._news.setdefault(gateway, Tokens([]))


def _is_urgent(entry: Entry, news: NewTokens) -> bool:
    """A gateway may find that an answer has ended: nothing should be computed after that."""
    may_end_there = bool(entry.request.params.stop)
    return entry.is_rt or may_end_there or bool(news.finish_reason) or len(news.tokens) >= AT_ONCE


def _both(one: NewTokens, next_one: NewTokens) -> NewTokens:
    return replace(
        next_one,
        first=one.first,
        tokens=one.tokens + next_one.tokens,
        logprobs=one.logprobs + next_one.logprobs,
        prompt_logprobs=one.prompt_logprobs or next_one.prompt_logprobs,
        num_reused=one.num_reused or next_one.num_reused,
    )
