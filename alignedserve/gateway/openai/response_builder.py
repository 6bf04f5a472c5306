"""OpenAI's answer objects, complete and in chunks. Chats and completions differ only in form.

Answers can be large: 256 choices, or log-probabilities of half a million tokens. So each delta is added when it comes,
at a cost that does not grow with what came before, and large parts are kept as JSON's bytes.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from alignedserve.gateway.http.json_pieces import Columns, Json, Piece, array_of, encode, object_of
from alignedserve.gateway.model import ServedModel
from alignedserve.gateway.openai.generation import Delta, Usage
from alignedserve.gateway.openai.token_logprobs import (
    prompt_positions,
)
from alignedserve.gateway.tools.calls import CollectedCalls


@dataclass
class CollectedChoice:
    """What has come of a choice, for an answer that is sent complete."""

    texts: list[str] = field(default_factory=list)
    # Content and tool calls: a chat has these instead of texts.
    calls: CollectedCalls = field(default_factory=CollectedCalls)
    logprobs: Columns = field(default_factory=Columns)
    finish_reason: str | None = None
    # The prompt's log-probabilities, packed (prompt_logprobs.py).
    prompt_logprobs: bytes = b""
    # The number of its tokens, and the sum of their log-probabilities.
    num_tokens: int = 0
    sum_logprobs: float = 0.0

    @property
    def likelihood(self) -> float:
        return self.sum_logprobs / max(1, self.num_tokens)


@dataclass
class ResponseBuilder(ABC):
    model: ServedModel
    created: int
    # The number of likeliest tokens that are shown with each token; None: no log-probabilities.
    num_logprobs: int | None
    service_tier: str = "default"
    id: str = ""
    prompts: Sequence[list[int]] = ()
    # The same for each of a prompt's tokens.
    num_prompt_logprobs: int | None = None
    # The number of characters that each choice has so far.
    _lengths: dict[int, int] = field(default_factory=dict)
    _choices: dict[int, CollectedChoice] = field(default_factory=dict)

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __post_init__(self) -> None:
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"

    # ---- whole ----

    def add(self, delta: Delta) -> None:
        choice = self._choices.setdefault(delta.index, CollectedChoice())
        if delta.prompt_logprobs:
            choice.prompt_logprobs = delta.prompt_logprobs
        if self.num_logprobs is not None:
            choice.logprobs.add(self._logprobs(delta))
        choice.num_tokens += len(delta.token_ids)
        choice.sum_logprobs += sum(logprob for logprob, _, _ in delta.logprobs)
        self._lengths[delta.index] = self._lengths.get(delta.index, 0) + len(delta.text)
        choice.finish_reason = delta.finish_reason
        self._add_text(choice, delta)

    def whole(self, usage: Usage) -> Iterator[Piece]:
        """Yields the answer, after everything has been added."""
        choices = sorted(self._given().items())
        body = self._envelope(self.kind) | {"usage": usage.body}
        members = {"choices": array_of(self._whole_choice(index, choice) for index, choice in choices)}
        return object_of(body, members | self._further_members())

    def _add_text(self, choice: CollectedChoice, delta: Delta) -> None:
        choice.texts.append(delta.text)

    def _given(self) -> dict[int, CollectedChoice]:
        """The choices that the answer gives, by their numbers in it."""
        return self._choices

    def _further_members(self) -> dict[str, Iterable[Piece]]:
        return {}

    def _prompt_logprobs(self, prompt: Sequence[int], packed: bytes) -> dict[str, Iterable[Piece]]:
        """Returns vLLM's field, if the client asks for it."""
        if self.num_prompt_logprobs is None:
            return {}
        positions = prompt_positions(prompt, packed, self.num_prompt_logprobs, self.model.token_text)
        return {"prompt_logprobs": array_of([encode(position)] for position in positions)}

    @abstractmethod
    def _whole_choice(self, index: int, choice: CollectedChoice) -> Iterator[Piece]: ...

    # ---- in chunks ----

    def opening(self, delta: Delta, extra: Json) -> Iterator[Piece] | None:
        """Returns the chunk that goes before a choice's first one, where there is one. `extra` is a part of each
        chunk."""
        if delta.index in self._lengths:
            return None
        choice = self._opening(delta)
        return choice and object_of(self._envelope(self.chunk_kind) | extra, {"choices": array_of([choice])})

    def chunk(self, delta: Delta, extra: Json) -> Json | None:
        """Returns the chunk; None for a token without text, unless the chunk has another content."""
        logprobs = None if self.num_logprobs is None else self._logprobs(delta)
        self._lengths[delta.index] = self._lengths.get(delta.index, 0) + len(delta.text)
        if not (delta.text or logprobs or delta.finish_reason):
            return None
        choices = [self._chunk_choice(delta, logprobs)]
        return self._envelope(self.chunk_kind) | {"choices": choices} | extra

    def usage_chunk(self, usage: Usage) -> Json:
        return self._envelope(self.chunk_kind) | {"choices": [], "usage": usage.body}

    def _opening(self, first: Delta) -> Iterator[Piece] | None:
        """Returns the first chunk of a choice's stream."""
        return None

    @abstractmethod
    def _chunk_choice(self, delta: Delta, logprobs: Json | None) -> Json: ...

    # ---- both ----

    def _envelope(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.system_fingerprint,
            "service_tier": self.service_tier,
        }

    @abstractmethod
    def _logprobs(self, delta: Delta) -> Json:
        """Returns lists by name, to which those of later deltas are joined."""
