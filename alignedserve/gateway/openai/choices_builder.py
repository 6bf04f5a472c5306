"""Builds OpenAI's answer objects, whole and in chunks. Chats and completions differ only in form."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import ClassVar

import msgspec

from alignedserve.gateway.generation.call import CallContext, ChoiceDelta, ResponseBuilder, TokenUsage
from alignedserve.gateway.generation.chat import TextSpec
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Columns, Json, Piece, array_of, encode, list_of, object_of
from alignedserve.gateway.openai.token_logprobs import TextOf, prompt_positions
from alignedserve.gateway.tools.readers import CollectedText

DONE = b"data: [DONE]\n\n"


class Shown(msgspec.Struct, frozen=True):
    """What an answer shows besides its text."""

    # The number of top tokens with each token. None: no log-probabilities.
    num_logprobs: int | None = None
    # The same for each token of the prompt.
    num_prompt_logprobs: int | None = None
    # Whether a stream ends with its usage, and whether each chunk has the usage so far (vLLM).
    usage: bool = False
    usage_so_far: bool = False
    # Whether it has the token ids of the prompt and the output (vLLM).
    token_ids: bool = False
    # Whether log-probabilities name tokens by their ids (vLLM).
    tokens_as_ids: bool = False


class ChoicesSpec(TextSpec, frozen=True, kw_only=True):
    shown: Shown = Shown()


@dataclass
class CollectedChoice:
    """A choice of an answer that is sent whole, as far as it has arrived."""

    texts: list[str] = field(default_factory=list)
    # Reasoning, content and tool calls: a chat has these instead of `texts`.
    text: CollectedText = field(default_factory=CollectedText)
    logprobs: Columns = field(default_factory=Columns)
    # Its token ids, if requested.
    token_ids: Columns = field(default_factory=Columns)
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
class ChoicesBuilder(ResponseBuilder):
    answering: CallContext
    spec: ChoicesSpec
    # The number of characters of each choice so far.
    _lengths: dict[int, int] = field(default_factory=dict)
    _choices: dict[int, CollectedChoice] = field(default_factory=dict)

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __post_init__(self) -> None:
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self.model, self.prompts = self.answering.model, self.answering.prompts
        self.shown, self.num_logprobs = self.spec.shown, self.spec.shown.num_logprobs

    @property
    def text_of(self) -> TextOf:
        """Returns the text of a token in log-probabilities."""
        return "token_id:{}".format if self.shown.tokens_as_ids else self.model.token_text

    # ---- whole ----

    def add(self, delta: ChoiceDelta) -> None:
        choice = self._choices.setdefault(delta.index, CollectedChoice())
        if delta.prompt_logprobs:
            choice.prompt_logprobs = delta.prompt_logprobs
        if self.num_logprobs is not None:
            choice.logprobs.add(self._logprobs(delta))
        if self.shown.token_ids:
            choice.token_ids.add({"token_ids": delta.token_ids})
        choice.num_tokens += len(delta.token_ids)
        choice.sum_logprobs += sum(logprob for logprob, _, _ in delta.logprobs)
        self._lengths[delta.index] = self._lengths.get(delta.index, 0) + len(delta.text)
        choice.finish_reason = delta.finish_reason
        self._add_text(choice, delta)

    def whole(self, usage: TokenUsage) -> Iterator[Piece]:
        choices = sorted(self._given().items())
        body = self._envelope(self.kind) | {"usage": self._usage(usage)}
        members = {"choices": array_of(self._whole_choice(index, choice) for index, choice in choices)}
        return object_of(body, members | self._further_members())

    def _add_text(self, choice: CollectedChoice, delta: ChoiceDelta) -> None:
        choice.texts.append(delta.text)

    def _given(self) -> dict[int, CollectedChoice]:
        """The choices that the answer shows, by their numbers in it."""
        return self._choices

    def _further_members(self) -> dict[str, Iterable[Piece]]:
        return {}

    def _prompt_logprobs(self, prompt: Sequence[int], packed: bytes) -> dict[str, Iterable[Piece]]:
        """Returns vLLM's field, if requested."""
        num = self.shown.num_prompt_logprobs
        if num is None:
            return {}
        positions = prompt_positions(prompt, packed, num, self.model.token_text)
        return {"prompt_logprobs": array_of([encode(position)] for position in positions)}

    def _prompt_ids(self, prompt: Sequence[int]) -> dict[str, Iterable[Piece]]:
        return {"prompt_token_ids": list_of(prompt)} if self.shown.token_ids else {}

    @abstractmethod
    def _whole_choice(self, index: int, choice: CollectedChoice) -> Iterator[Piece]: ...

    # ---- in chunks ----

    def opening(self, delta: ChoiceDelta, usage: TokenUsage) -> Iterable[Piece] | None:
        """Returns the chunk that precedes the first chunk of a choice, if there is one."""
        if delta.index in self._lengths:
            return None
        choice = self._opening(delta)
        if choice is None:
            return None
        # The tokens of this delta are those of the next chunk.
        before = replace(usage, num_completion_tokens=usage.num_completion_tokens - len(delta.token_ids))
        members = {"choices": array_of([choice])} | self._opening_members()
        return _large_event(object_of(self._chunk(before), members))

    def events(self, delta: ChoiceDelta, usage: TokenUsage) -> bytes | Iterable[Piece]:
        logprobs = None if self.num_logprobs is None else self._logprobs(delta)
        is_first, has_ids = delta.index not in self._lengths, self.shown.token_ids and bool(delta.token_ids)
        self._lengths[delta.index] = self._lengths.get(delta.index, 0) + len(delta.text)
        if not (delta.text or logprobs or delta.finish_reason or has_ids):
            return b""
        choice = self._chunk_choice(delta, logprobs)
        if not (logprobs or delta.finish_reason or has_ids or self._has_news(choice)):
            return b""
        if self.shown.token_ids:
            choice["token_ids"] = delta.token_ids
        chunk, members = self._chunk(usage), self._first_members(delta) if is_first else {}
        if not members:
            return _event(chunk | {"choices": [choice]})
        return _large_event(object_of(chunk, {"choices": array_of([object_of(choice, members)])}))

    def progress(self, delta: ChoiceDelta, usage: TokenUsage) -> bytes:
        """Returns a chunk with llama.cpp's fields."""
        assert delta.progress
        progress: Json = {
            "total": delta.progress.num_tokens,
            "cache": delta.progress.num_reused,
            "processed": delta.progress.num_computed,
            "time_ms": round(delta.progress.seconds * 1000),
        }
        chunk = self._chunk(usage) | {"choices": [self._chunk_choice(delta, None)]}
        return _event(chunk | {"prompt_progress": progress})

    def end(self, usage: TokenUsage) -> Iterable[Piece]:
        if self.shown.usage:
            yield _event(self._envelope(self.chunk_kind) | {"choices": [], "usage": self._usage(usage)})
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        return _event(error.body) + DONE

    def _opening(self, first: ChoiceDelta) -> Iterator[Piece] | None:
        """Returns the choice of the chunk that precedes a choice's first one. None: there is no such chunk."""
        return None

    def _opening_members(self) -> dict[str, Iterable[Piece]]:
        """Returns the other members of that chunk."""
        return {}

    def _first_members(self, first: ChoiceDelta) -> dict[str, Iterable[Piece]]:
        """Returns further members of a choice's first chunk with tokens, which may be large."""
        return {}

    def _has_news(self, choice: Json) -> bool:
        """Whether the choice of a chunk shows anything. It does not if its text may be part of a mark."""
        return True

    @abstractmethod
    def _chunk_choice(self, delta: ChoiceDelta, logprobs: Json | None) -> Json: ...

    def _chunk(self, usage: TokenUsage) -> Json:
        """Returns the fields that all chunks have."""
        extra: Json = {}
        if self.shown.usage:
            # Null before the last chunk, unless requested in each.
            extra = {"usage": self._usage(usage) if self.shown.usage_so_far else None}
        return self._envelope(self.chunk_kind) | extra

    # ---- both ----

    def _envelope(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.answering.created,
            "model": self.model.name,
            "system_fingerprint": self.model.system_fingerprint,
            "service_tier": self.answering.tier,
        }

    def _usage(self, usage: TokenUsage) -> Json:
        return usage.body

    @abstractmethod
    def _logprobs(self, delta: ChoiceDelta) -> Json:
        """Returns lists by name. Those of later deltas are appended to them."""


def _event(body: Json) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


def _large_event(body: Iterable[Piece]) -> Iterable[Piece]:
    return chain([b"data: "], body, [b"\n\n"])
