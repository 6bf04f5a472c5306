"""A simulated gateway with its clients. It knows each request's tokens, and accepts no others in a checked world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    Hello,
    NewTokens,
    Rejected,
    Request,
    Submit,
    Tokens,
)
from alignedserve.sim import model
from alignedserve.sim.process import SimProcess
from alignedserve.sim.world import World
from alignedserve.types import InstanceId, RequestKey


@dataclass(slots=True)
class Stream:
    """The answer that a client has received."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    # The second at which each of the tokens arrived.
    times_s: list[float] = field(default_factory=list)
    # How the stream ended: "stop", "length", "error", the reason for its rejection, "abort" (by the client), or "lost"
    # (its gateway died). None while it is open.
    outcome: str | None = None
    ended_s: float = 0.0
    num_submitted: int = 0
    # Prompt tokens with KV that was already there when its first token came.
    num_reused: int = 0

    @property
    def is_complete(self) -> bool:
        return self.outcome in ("stop", "length")


class SimGateway(SimProcess):
    role = "gateway"
    world: World

    def __init__(self, world: World, instance_id: InstanceId, max_model_len: int) -> None:
        super().__init__(world, instance_id)
        self.streams: dict[RequestKey, Stream] = {}
        self.open: dict[RequestKey, Stream] = {}
        # Each listener is called with every stream that has ended, for whatever reason.
        self.listeners: list[Callable[[Stream], None]] = []
        self._max_model_len = max_model_len

    # ---- clients ----

    def submit(self, request: Request) -> None:
        stream = Stream(request)
        self.world.kv.add(request)
        self.streams[request.key] = self.open[request.key] = stream
        if not self.is_up:
            self._end(stream, "lost")
        self._send_submit(stream)

    def abort(self, key: RequestKey) -> None:
        """Ends a request because its client leaves. Does nothing if the request has ended."""
        if key in self.open:
            self._end(self.open[key], "abort")
            self.send(Abort([key]))

    def kill(self) -> None:
        super().kill()
        for stream in list(self.open.values()):
            self._end(stream, "lost")

    def _end(self, stream: Stream, outcome: str) -> None:
        stream.outcome, stream.ended_s = outcome, self.world.clock.now
        del self.open[stream.request.key]
        self.world.kv.ended(stream.request.key)
        for listener in self.listeners:
            listener(stream)

    # ---- the router ----

    def hello(self) -> Hello:
        if self.open:
            self.after(0.0, self._submit_all)
        return super().hello()

    def _submit_all(self) -> None:
        for stream in self.open.values():
            self._send_submit(stream)

    def _send_submit(self, stream: Stream) -> None:
        request, world = stream.request, self.world
        stream.num_submitted += 1
        waited_s = world.clock.now - request.arrival_s
        self.send(Submit(request, list(stream.tokens), world.foresee(request), waited_s))

    def on_message(self, message: AnyMessage) -> None:
        match message:
            case Tokens():
                now = self.world.clock.now
                for news in message.news:
                    self._news(news, now)
            case Rejected():
                self._rejected(message)
            case _:
                raise ValueError(f"{self.instance_id} got a {type(message).__name__}, not for gateways")

    def _rejected(self, rejected: Rejected) -> None:
        """Submits a request that was accepted before until it is accepted again, as islands/island.py does."""
        if (stream := self.open.get(rejected.key)) is None:
            return
        if (wait_s := rejected.wait_s(stream.num_submitted)) is not None:
            self.after(wait_s, partial(self._submit_again, stream, stream.num_submitted))
        else:
            self._end(stream, rejected.reason)

    def _submit_again(self, stream: Stream, num_submitted: int) -> None:
        if stream.outcome is None and stream.num_submitted == num_submitted:
            self._send_submit(stream)

    def _news(self, news: NewTokens, now: float) -> None:
        """Takes new tokens. Raises RuntimeError unless each comes once: a router repeats only tokens that have not
        arrived."""
        stream = self.open.get(news.key)
        if stream is None:
            self._check_late(news)
            return
        tokens = news.tokens
        num_known = len(stream.tokens)
        if news.first != num_known:
            raise RuntimeError(
                f"request {news.key}: {num_known} tokens came, then those from {news.first} on"
            )
        if not num_known:
            stream.num_reused = news.num_reused
        if self.world.is_checked:
            self._check_tokens(stream, tokens)
        stream.tokens += tokens
        stream.times_s += [now] * len(tokens)
        if news.finish_reason:
            self._finish(stream, news)

    @staticmethod
    def _check_tokens(stream: Stream, tokens: Sequence[int]) -> None:
        request = stream.request
        for k, token in enumerate(tokens, start=len(stream.tokens)):
            right = model.sample(request.seed, k)
            if token != right:
                raise RuntimeError(f"request {request.key}: token {k} is {token}, must be {right}")

    def _finish(self, stream: Stream, news: NewTokens) -> None:
        request = stream.request
        right = model.finish_reason(
            request.seed,
            len(request.prompt),
            request.params.max_tokens,
            len(stream.tokens),
            self._max_model_len,
        )
        if request.is_embedding:
            right = "stop"
            self._check_embedding(stream, news)
        if news.finish_reason not in (right, "error"):
            raise RuntimeError(
                f"request {news.key}: ends with {news.finish_reason} after {len(stream.tokens)} tokens, must be {right}"
            )
        self._end(stream, news.finish_reason or "")

    def _check_embedding(self, stream: Stream, news: NewTokens) -> None:
        request = stream.request
        if not self.world.is_checked:
            return
        chain = self.world.kv.chain(request.key, request.prompt, request.seed, request.adapter)
        if stream.tokens or (news.embedding != chain.embedding and news.finish_reason != "error"):
            raise RuntimeError(
                f"request {request.key}: has {len(stream.tokens)} tokens, and {news.embedding!r} for an embedding"
            )

    def _check_late(self, news: NewTokens) -> None:
        """Raises RuntimeError for tokens after the end. Tokens may still arrive after a client has left."""
        stream = self.streams.get(news.key)
        if stream is None or stream.is_complete:
            raise RuntimeError(f"request {news.key} gets {news} after its end")
