"""OpenAI's answer objects, whole and in chunks. Chats and completions differ in shape only."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from alignedserve.gateway.best_of import keep_best
from alignedserve.gateway.generation import Delta, Usage
from alignedserve.gateway.model import ServedModel
from alignedserve.gateway.token_logprobs import TextOffsets, completion_logprobs, prompt_positions
from alignedserve.gateway.tool_calls import Piece, Read
from alignedserve.gateway.tool_readers import Reader
from alignedserve.prompt_logprobs import TokenLogprobs, unpack

Json = dict[str, Any]


@dataclass
class _Whole:
    """A choice, collected."""

    text: str = ""
    logprobs: Json | None = None
    finish_reason: str | None = None
    # packed
    prompt_logprobs: bytes = b""


@dataclass
class Answer(ABC):
    model: ServedModel
    created: int
    # likeliest tokens to be shown with each token; None: no log-probabilities
    num_logprobs: int | None
    service_tier: str = "default"
    id: str = ""
    prompts: Sequence[list[int]] = ()
    # the same with each of a prompt's tokens
    num_prompt_logprobs: int | None = None
    # of each choice, characters said
    _lengths: dict[int, int] = field(default_factory=dict)

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __post_init__(self) -> None:
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"

    def whole(self, deltas: list[Delta], usage: Usage) -> Json:
        choices: dict[int, _Whole] = {}
        for delta in deltas:
            self._collect(choices.setdefault(delta.index, _Whole()), delta)
        listed = [self._whole_choice(index, choices[index]) for index in sorted(choices)]
        return self._envelope(self.kind, listed) | {"usage": usage.body}

    def chunks(self, delta: Delta) -> list[Json]:
        """None for a token without text, unless there is something else to say of it."""
        choices = [] if delta.index in self._lengths else self._opening(delta)
        logprobs = None if self.num_logprobs is None else self._logprobs(delta)
        self._lengths[delta.index] = self._lengths.get(delta.index, 0) + len(delta.text)
        if delta.text or logprobs or delta.finish_reason:
            choices.append(self._chunk_choice(delta, logprobs))
        return [self._envelope(self.chunk_kind, [choice]) for choice in choices]

    def usage_chunk(self, usage: Usage) -> Json:
        return self._envelope(self.chunk_kind, []) | {"usage": usage.body}

    def _collect(self, choice: _Whole, delta: Delta) -> None:
        if delta.prompt_logprobs:
            choice.prompt_logprobs = delta.prompt_logprobs
        if self.num_logprobs is not None:
            found = self._logprobs(delta)
            choice.logprobs = found if choice.logprobs is None else self._join(choice.logprobs, found)
        self._lengths[delta.index] = self._lengths.get(delta.index, 0) + len(delta.text)
        choice.text += delta.text
        choice.finish_reason = delta.finish_reason

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.system_fingerprint,
            "service_tier": self.service_tier,
            "choices": choices,
        }

    def _join(self, some: Json, more: Json) -> Json:
        return {name: some[name] + more[name] for name in some}

    def _opening(self, first: Delta) -> list[Json]:
        """What a choice's stream begins with."""
        return []

    def _of_prompt(self, index: int, choice: _Whole) -> Json:
        """vLLM's field, where asked for."""
        if self.num_prompt_logprobs is None:
            return {}
        prompt, found = self.prompts[index], unpack(choice.prompt_logprobs)
        positions = prompt_positions(prompt, found, self.num_prompt_logprobs, self.model.token_text)
        return {"prompt_logprobs": positions}

    @abstractmethod
    def _whole_choice(self, index: int, choice: _Whole) -> Json: ...

    @abstractmethod
    def _chunk_choice(self, delta: Delta, logprobs: Json | None) -> Json: ...

    @abstractmethod
    def _logprobs(self, delta: Delta) -> Json: ...


@dataclass
class CompletionAnswer(Answer):
    # choices of each prompt: those that are made, and those that are given
    num_made: int = 1
    num_given: int = 1
    # of each prompt, what its answers begin with
    echoes: Sequence[str] | None = None
    # of each choice
    _offsets: dict[int, TextOffsets] = field(default_factory=dict)

    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def whole(self, deltas: list[Delta], usage: Usage) -> Json:
        if self.num_given < self.num_made:
            deltas = keep_best(deltas, self.num_made, self.num_given)
        return super().whole(deltas, usage)

    def _opening(self, first: Delta) -> list[Json]:
        if self.echoes is None:
            return []
        logprobs = (
            None if self.num_logprobs is None else self._echoed_logprobs(first.index, first.prompt_logprobs)
        )
        return [
            {
                "index": first.index,
                "text": self._echo(first.index),
                "logprobs": logprobs,
                "finish_reason": None,
            }
        ]

    def _echo(self, index: int) -> str:
        return "" if self.echoes is None else self.echoes[index // self.num_given]

    def _echoed_logprobs(self, index: int, packed: bytes) -> Json:
        found = [None, *unpack(packed)]
        prompt = self.prompts[index // self.num_given]
        offsets = TextOffsets(self.model.token_bytes).append(prompt, 0)
        return completion_logprobs(prompt, found, self.num_logprobs or 0, offsets, self.model.token_text)

    def _whole_choice(self, index: int, choice: _Whole) -> Json:
        logprobs = choice.logprobs
        if self.echoes is not None and logprobs is not None:
            logprobs = self._join(self._echoed_logprobs(index, choice.prompt_logprobs), logprobs)
        return {
            "index": index,
            "text": self._echo(index) + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        } | self._of_prompt(index // self.num_given, choice)

    def _chunk_choice(self, delta: Delta, logprobs: Json | None) -> Json:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: Delta) -> Json:
        # text appears when its last token does: the offsets of tokens that come together are counted from there
        offset = len(self._echo(delta.index)) + self._lengths.get(delta.index, 0)
        if delta.index not in self._offsets:
            self._offsets[delta.index] = TextOffsets(self.model.token_bytes)
        offsets = self._offsets[delta.index].append(delta.token_ids, offset)
        num = self.num_logprobs or 0
        return completion_logprobs(delta.token_ids, delta.logprobs, num, offsets, self.model.token_text)


@dataclass
class ChatAnswer(Answer):
    # finds tool calls in the text, where there are tools
    new_reader: Callable[[], Reader] | None = None
    _readers: dict[int, Reader] = field(default_factory=dict)
    # of each choice, calls made
    _num_calls: dict[int, int] = field(default_factory=dict)

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def whole(self, deltas: list[Delta], usage: Usage) -> Json:
        first = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), b"")
        return super().whole(deltas, usage) | self._of_prompt(0, _Whole(prompt_logprobs=first))

    def _opening(self, first: Delta) -> list[Json]:
        role = {"role": "assistant", "content": ""}
        return [{"index": first.index, "delta": role, "logprobs": None, "finish_reason": None}]

    def _whole_choice(self, index: int, choice: _Whole) -> Json:
        read = self._read(index, choice.text, choice.finish_reason)
        # whole, each piece begins one
        calls = [_call_body(piece) for piece in read.pieces]
        self._num_calls[index] = len(calls)
        content = None if calls and not read.content else read.content
        message = {"role": "assistant", "content": content, "refusal": None}
        return {
            "index": index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": choice.logprobs,
            "finish_reason": self._reason(index, choice.finish_reason),
        }

    def _chunk_choice(self, delta: Delta, logprobs: Json | None) -> Json:
        read = self._read(delta.index, delta.text, delta.finish_reason)
        new: Json = {"content": read.content} if read.content or logprobs else {}
        if read.pieces:
            new["tool_calls"] = self._piece_bodies(delta.index, read.pieces)
        return {
            "index": delta.index,
            "delta": new,
            "logprobs": logprobs,
            "finish_reason": self._reason(delta.index, delta.finish_reason),
        }

    def _read(self, index: int, text: str, finish_reason: str | None) -> Read:
        if self.new_reader is None:
            return Read(text)
        if index not in self._readers:
            self._readers[index] = self.new_reader()
        read = self._readers[index].feed(text)
        if finish_reason is not None:
            read.add(self._readers[index].end())
        return read

    def _piece_bodies(self, index: int, pieces: Sequence[Piece]) -> list[Json]:
        bodies = []
        for piece in pieces:
            is_new = piece.name is not None
            self._num_calls[index] = self._num_calls.get(index, 0) + is_new
            body = _call_body(piece) if is_new else {"function": {"arguments": piece.arguments}}
            bodies.append({"index": self._num_calls[index] - 1} | body)
        return bodies

    def _reason(self, index: int, finish_reason: str | None) -> str | None:
        if finish_reason == "stop" and self._num_calls.get(index):
            return self._readers[index].stop_reason
        return finish_reason

    def _logprobs(self, delta: Delta) -> Json:
        pairs = zip(delta.token_ids, delta.logprobs, strict=True)
        return {"content": [self._token(token_id, found) for token_id, found in pairs]}

    def _token(self, token_id: int, found: TokenLogprobs) -> Json:
        logprob, _, top = found
        likeliest = sorted(top.items(), key=lambda item: -item[1])
        return self._named(token_id, logprob) | {"top_logprobs": [self._named(*item) for item in likeliest]}

    def _named(self, token_id: int, logprob: float) -> Json:
        text, its_bytes = self.model.token_text(token_id), self.model.token_bytes(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(its_bytes)}


def _call_body(piece: Piece) -> Json:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": piece.name, "arguments": piece.arguments},
    }
