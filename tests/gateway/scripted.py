"""An island that answers by a script, with a real hub on a real socket and a model that outputs what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from alignedserve import demo
from alignedserve.engine.config import EngineConfig
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.protocol.hub import Hub
from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    AskCluster,
    Cluster,
    Echo,
    Hello,
    NewTokens,
    ProcessStatus,
    PromptProgress,
    Rejected,
    Request,
    ResetPrefixCache,
    Submit,
    Tokens,
    Welcome,
)
from alignedserve.protocol.pooling import DTYPE
from alignedserve.types import Epoch, InstanceId, RequestKey

TOKEN = "secret"

MODEL = ServedModel.load("demo", EngineConfig(str(demo.MODEL_DIR)))
assert MODEL.tokenizer
TOKENIZER = MODEL.tokenizer
EOS = next(iter(MODEL.vocabulary.eos_token_ids))


def answer_of(text: str) -> list[int]:
    return [*TOKENIZER.encode(text), EOS]


def vector_of(prompt: list[int]) -> np.ndarray:
    """Returns the embedding of a prompt. Different prompts have different ones; all have length 1."""
    assert MODEL.embedding_size
    numbers = np.random.default_rng(prompt).standard_normal(MODEL.embedding_size)
    return (numbers / np.linalg.norm(numbers)).astype(DTYPE)


class ScriptedRouter:
    """Answers every request with `answer`, a token at a time, as far as `allowed` permits. It answers embedding
    requests with a vector, unless its size is 0."""

    def __init__(self, epoch: int = 1, answer: list[int] | None = None) -> None:
        self.answer = answer or answer_of("one two three")
        self.hub = Hub(TOKEN, self)
        self.submitted: list[Submit] = []
        self.aborted: list[RequestKey] = []
        # Returns a refusal for a submission, or None.
        self.refuse: Callable[[Submit], Rejected | None] = lambda submit: None
        # The number of tokens that each request may get; None: all.
        self.allowed: int | None = None
        self.processes: list[ProcessStatus] = [
            process_status(role) for role in ("kvpool", "prefill", "decode")
        ]
        self.answers_cluster = True
        self.num_resets = 0
        self._epoch = Epoch(epoch)
        self._open: dict[RequestKey, tuple[InstanceId, Request, int]] = {}
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def allow(self, count: int | None) -> None:
        self.allowed = count
        for key in list(self._open):
            self._say(key)

    def read(self, num_computed: int, num_reused: int, seconds: float) -> None:
        """Reports progress on the prompt of each open request, to those that want it."""
        for key, (gateway, request, _) in self._open.items():
            if request.reports_progress:
                num_tokens = len(request.prompt)
                progress = PromptProgress(key, num_tokens, num_computed, num_reused, seconds)
                self.hub.send(gateway, Tokens([], progress=[progress]))

    def fail(self, reason: str) -> None:
        for key, (gateway, _, first) in list(self._open.items()):
            self.hub.send(gateway, Tokens([NewTokens(key, first, [], finish_reason="error", error=reason)]))
        self._open.clear()

    # ---- what the hub hears ----

    def connected(self, hello: Hello) -> None:
        self.hub.send(hello.instance_id, Welcome(self._epoch))
        self._changed.set()

    def closed(self, instance_id: InstanceId, epoch: Epoch) -> None:
        self._changed.set()

    def received(self, hello: Hello, message: AnyMessage) -> None:
        match message:
            case Submit():
                self._submit(hello.instance_id, message)
            case Abort(keys=keys):
                self.aborted += keys
                for key in keys:
                    self._open.pop(key, None)
            case Echo():
                self.echo(hello.instance_id, message)
            case ResetPrefixCache():
                self.num_resets += 1
                self.hub.send(hello.instance_id, message)
            case AskCluster(ticket=ticket) if self.answers_cluster:
                self.hub.send(hello.instance_id, self.cluster(ticket))
        self._changed.set()

    def echo(self, sender: InstanceId, echo: Echo) -> None:
        self.hub.send(sender, echo)

    def cluster(self, ticket: int) -> Cluster:
        return Cluster(ticket, self.processes, {"running": len(self._open)})

    def _submit(self, gateway: InstanceId, submit: Submit) -> None:
        self.submitted.append(submit)
        if rejected := self.refuse(submit):
            self.hub.send(gateway, rejected)
            return
        self._open[submit.request.key] = (gateway, submit.request, len(submit.delivered))
        self._say(submit.request.key)

    def _say(self, key: RequestKey) -> None:
        gateway, request, first = self._open[key]
        room = min(len(self.answer), request.params.max_tokens or len(self.answer))
        end = room if self.allowed is None else min(room, self.allowed)
        for position in range(first, end):
            is_last = position == room - 1
            token = self.answer[position]
            reason = ("stop" if token == EOS else "length") if is_last else None
            logprobs = [] if request.params.logprobs is None else [[-0.25, 1, {token: -0.25, 7: -2.0}]]
            news = self._tokens(request, NewTokens(key, position, [token], logprobs, reason))
            self.hub.send(gateway, Tokens([news]))
        self._open[key] = (gateway, request, max(first, end))
        if end == room:
            del self._open[key]

    def _tokens(self, request: Request, news: NewTokens) -> NewTokens:
        """Returns the replacement for these tokens, if there is one."""
        if request.is_embedding:
            embedding = vector_of(request.prompt).tobytes()
            return NewTokens(request.key, 0, [], finish_reason="stop", embedding=embedding)
        return news


def process_status(role: str, state: str = "up") -> ProcessStatus:
    name, requests = InstanceId(f"{role}-0"), {"running": 1}
    return ProcessStatus(role, name, Epoch(1), 42, state, 10, 4, requests, started_s=1795300000.0)
