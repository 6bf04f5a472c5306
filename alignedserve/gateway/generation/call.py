"""A valid call of any API, what its answer is made of, and the interface by which each API makes its own form of it.

A `Call` is made in the child process that prepares bodies (endpoint.py). The gateway adds what the body does not have:
the owner and the times when tokens are due (service.py). Each of its requests is then a copy of `Call.request` with a
prompt and a key, and what it yields is a `ChoiceDelta`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import msgspec

from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Piece
from alignedserve.gateway.islands.islands import Islands
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.protocol.messages import PromptProgress, Request
from alignedserve.protocol.prompt_logprobs import TokenLogprobs
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestKey

# The type of token ids in `Call.prompts`: four bytes each.
_ID: Final = "i"
TOKEN_BYTES: Final = 4
# token ids that are unpacked at a time, which takes a millisecond
_STEP_IDS = 1 << 15

ServiceTier = Literal["auto", "default", "scale", "priority", "flex"]


# ---- what an answer is made of ----


@dataclass(frozen=True)
class ChoiceDelta:
    """The new tokens and text of a choice. The first token may have no text yet, and the last delta no tokens."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None
    # The prompt's log-probabilities, packed. If requested, they come with the first token.
    prompt_logprobs: bytes = b""
    # The stop string that ended the choice, with finish_reason "stop".
    stop_string: str | None = None
    # Progress of the prompt. Such a delta has no tokens.
    progress: PromptProgress | None = None
    # The text of each token, if there are several: tokens are joined if they arrive faster than they are sent.
    texts: Sequence[str] = ()

    def steps(self) -> Iterator[tuple[str, int]]:
        """Yields text and its number of tokens, one token at a time where the text of each is known."""
        if self.texts:
            yield from ((text, 1) for text in self.texts)
        else:
            yield self.text, len(self.token_ids)

    @property
    def is_cut(self) -> bool:
        """Whether a length limit or a stop string ended the choice, rather than the model."""
        return self.finish_reason == "length" or self.stop_string is not None


@dataclass
class TokenUsage:
    num_prompt_tokens: int
    num_completion_tokens: int = 0
    # Prompt tokens with KV reused from earlier prompts.
    num_cached_tokens: int = 0

    @property
    def body(self) -> dict[str, Any]:
        prompt, completion = self.num_prompt_tokens, self.num_completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            # OpenAI's API always has this field; vLLM omits it by default.
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


# Answers can be large: 256 choices, or log-probabilities of half a million tokens. So each delta is added when it
# arrives, at a cost that does not grow with the answer so far. Large parts are made in pieces (http/json_pieces.py).


class ResponseBuilder(ABC):
    """An answer is either made whole, by `add` and `whole`, or streamed, by the other methods."""

    @abstractmethod
    def add(self, delta: ChoiceDelta) -> None: ...

    @abstractmethod
    def whole(self, usage: TokenUsage) -> Iterator[Piece]:
        """Yields the answer, after all deltas were added."""

    def progress(self, delta: ChoiceDelta, usage: TokenUsage) -> bytes:
        """Returns the event that reports a prompt's progress, in APIs that have one."""
        return b""

    @abstractmethod
    def opening(self, delta: ChoiceDelta, usage: TokenUsage) -> Iterable[Piece] | None:
        """Returns the events before those of `delta`, if there are any. They may be large. `usage` includes this
        delta."""

    @abstractmethod
    def events(self, delta: ChoiceDelta, usage: TokenUsage) -> bytes | Iterable[Piece]:
        """Returns the events of new tokens, in pieces if they may be large. Empty for a token without text."""

    @abstractmethod
    def end(self, usage: TokenUsage) -> Iterable[Piece]:
        """Returns the events after the last delta."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes | Iterable[Piece]:
        """Returns the events that end a failed stream."""


# ---- the call ----


@dataclass(frozen=True)
class CallContext:
    """What a response builder needs besides the call's spec."""

    model: ServedModel
    # The name of the service tier in the answer.
    tier: str
    prompts: Sequence[list[int]]
    # Seconds since 1970.
    created: int


class CallRunner(Protocol):
    """What a call needs to run: see RequestBuilder."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def islands(self) -> Islands: ...

    @property
    def embedding_pooling(self) -> str: ...

    async def collect(self, call: Call[Any]) -> tuple[ResponseBuilder, TokenUsage]: ...


class AnswerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How an API writes the answer to a call."""

    async def whole(self, call: Call[Any], runner: CallRunner) -> tuple[Iterable[Piece], Mapping[str, Any]]:
        """Runs the call to its end. Returns its answer as JSON, and the usage. Raises ApiError and InvalidRequest."""
        builder, usage = await runner.collect(call)
        return builder.whole(usage), usage.body

    def builder(self, answering: CallContext) -> ResponseBuilder:
        raise NotImplementedError


Spec = TypeVar("Spec", bound=AnswerSpec)


class Call(msgspec.Struct, Generic[Spec], frozen=True, kw_only=True):
    # What its requests have in common. Its grammar is not compiled yet: another process does that.
    request: Request
    # The token ids of each prompt, packed: lists take long to encode and decode.
    prompts: list[bytes]
    spec: Spec
    # The tier that the body asks for, and then the one that the call has (service.py).
    service_tier: ServiceTier | None
    ttft_ms: float | None
    tbt_ms: float | None = None
    # The name of the parameter that determines the form of the output.
    structure_name: str = ""
    is_stream: bool = False
    # False: the client asks for data that comes with the first token, and not for the token itself.
    gives_output: bool = True
    # Parameters of the body that were ignored: unknown ones, and those without effect on this model.
    ignored: list[str] = []

    def new_request(self, prompt: list[int], params: SamplingParams, seed: int) -> Request:
        return msgspec.structs.replace(
            self.request, key=new_key(), prompt=prompt, params=params, seed=seed, arrival_s=time.monotonic()
        )


def new_key() -> RequestKey:
    return RequestKey(1 + secrets.randbelow(2**63 - 1))


# ---- packed prompts ----


def packed(ids: Sequence[int]) -> bytes:
    return array(_ID, ids).tobytes()


async def unpacked(packed: bytes) -> list[int]:
    """Unpacks a prompt of a call."""
    ids: list[int] = []
    step = TOKEN_BYTES * _STEP_IDS
    for start in range(0, len(packed), step):
        if start:
            # Lets streams continue.
            await asyncio.sleep(0)
        ids += array(_ID, packed[start : start + step])
    return ids
