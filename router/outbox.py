"""What the router sends: the messages that one event causes, and tokens that wait a moment for others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from alignedserve.protocol.messages import AnyMessage, NewTokens, PromptProgress, Tokens
from alignedserve.router.cluster import ClusterState
from alignedserve.router.events import Send
from alignedserve.router.requests import RequestState
from alignedserve.types import InstanceId, RequestKey

# ---- tokens for gateways ---------------------------------------------------------------------------------------------


# Tokens after which a best-effort request's tokens go out. Requests that began at different times reach it at different
# times.
MAX_COALESCED_TOKENS = 8
# The longest delay of a token in seconds, up to one tick more.
MAX_DELAY_S = 0.25


@dataclass(eq=False, slots=True)
class _Delayed:
    state: RequestState
    since_s: float
    # The reports of instances, in order, and the number of tokens in them.
    parts: list[NewTokens]
    num_tokens: int


class OutputCoalescing:
    """Tokens on their way to gateways: real-time tokens go out at once, best-effort tokens several at a time.

    No client waits for single tokens of best effort, and each message costs a gateway CPU time that real-time answers
    need."""

    def __init__(self) -> None:
        # For each gateway, what it gets at the end of the event: tokens, and timelines of some requests.
        self._news: dict[InstanceId, Tokens] = {}
        # Tokens that wait for more of the same request, the oldest first.
        self._delayed: dict[RequestKey, _Delayed] = {}

    def add(self, state: RequestState, news: NewTokens, now: float) -> None:
        """Adds a request's next tokens."""
        key, num_tokens = state.key, len(news.tokens)
        delayed = self._delayed.get(key)
        if delayed is None:
            if state.deadlines.is_rt or _is_urgent(state, news, num_tokens):
                self._of(state.gateway).news.append(news)
            else:
                self._delayed[key] = _Delayed(state, now, [news], num_tokens)
            return
        delayed.parts.append(news)
        delayed.num_tokens += num_tokens
        if state.deadlines.is_rt or _is_urgent(state, news, delayed.num_tokens):
            del self._delayed[key]
            self._of(state.gateway).news.append(_merged(delayed.parts))

    def resend(self, state: RequestState, num_known: int) -> None:
        """Sends all of a request's tokens after the first `num_known`, which its gateway already has."""
        self._delayed.pop(state.key, None)
        self._of(state.gateway).news.append(NewTokens(state.key, num_known, state.output[num_known:]))

    def add_timeline(self, state: RequestState) -> None:
        """Sends the request's timeline so far along with its tokens."""
        self._of(state.gateway).timelines[state.key] = list(state.timeline)

    def add_progress(self, state: RequestState, num_computed: int, num_reused: int, now: float) -> None:
        """Reports how much of a request's prompt is computed, if it has no token yet and its gateway asked for
        reports."""
        if state.request.reports_progress and not state.output:
            num_tokens, seconds = len(state.request.prompt), now - state.since_s
            progress = PromptProgress(state.key, num_tokens, num_computed, num_reused, seconds)
            self._of(state.gateway).progress.append(progress)

    def discard(self, key: RequestKey) -> None:
        """Drops delayed tokens that no client waits for any more."""
        self._delayed.pop(key, None)

    def take(self, now: float) -> Iterable[tuple[InstanceId, Tokens]]:
        """Returns what each gateway should get at `now`."""
        while self._delayed and (first := next(iter(self._delayed.values()))).since_s <= now - MAX_DELAY_S:
            del self._delayed[first.state.key]
            self._of(first.state.gateway).news.append(_merged(first.parts))
        news, self._news = self._news, {}
        return news.items()

    def _of(self, gateway: InstanceId) -> Tokens:
        tokens = self._news.get(gateway)
        if tokens is None:
            tokens = self._news[gateway] = Tokens([])
        return tokens


def _is_urgent(state: RequestState, news: NewTokens, num_tokens: int) -> bool:
    """Returns whether best-effort tokens should go out at once. A request with stop strings is urgent: its gateway may
    find that the answer has ended, and nothing should be computed after that."""
    return num_tokens >= MAX_COALESCED_TOKENS or bool(news.finish_reason) or bool(state.request.params.stop)


def _merged(parts: Sequence[NewTokens]) -> NewTokens:
    """Returns the parts as one. The data that comes with a request's first token is in the first part."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return replace(
        parts[-1],
        first=first.first,
        tokens=[token for part in parts for token in part.tokens],
        logprobs=[each for part in parts for each in part.logprobs],
        prompt_logprobs=first.prompt_logprobs,
        num_reused=first.num_reused,
    )


# ---- all messages of an event ----------------------------------------------------------------------------------------


class Outbox:
    """The messages that one event causes, in order, until the end of the event."""

    def __init__(self, cluster: ClusterState, output: OutputCoalescing) -> None:
        self._cluster = cluster
        self._output = output
        self._sends: list[Send] = []

    def send(self, to: InstanceId | None, message: AnyMessage) -> None:
        """Sends to a process that is up. A process that is down has forgotten everything, so its messages are
        dropped."""
        if to is not None and to in self._cluster:
            self._sends.append(Send(to, message))

    def take(self, now: float) -> list[Send]:
        """Returns all messages. The last ones are tokens that are due at gateways by `now`, and changed announcements
        of real time for decode instances."""
        for gateway, tokens in self._output.take(now):
            self.send(gateway, tokens)
        for view in self._cluster.all_decodes:
            if (coming := view.take_announcement()) is not None:
                self.send(view.instance_id, coming)
        sends, self._sends = self._sends, []
        return sends
