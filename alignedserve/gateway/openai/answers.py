"""OpenAI's answer objects, whole and in chunks. Chats and completions differ in shape only.

Answers can be large: 256 choices, or log-probabilities of half a million tokens. So each delta is taken in when it
comes, at a cost that does not grow with what came before, and what is large is kept and written down as JSON's bytes.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from alignedserve.gateway.http.json_pieces import Columns, Piece, array_of, encode, object_of
from alignedserve.gateway.model import ServedModel
from alignedserve.gateway.openai.best_of import best_places
from alignedserve.gateway.openai.generation import Delta, Usage
from alignedserve.gateway.openai.token_logprobs import (
    TextOffsets,
    completion_logprobs,
    echoed_logprobs,
    finite,
    prompt_positions,
)
from alignedserve.gateway.tools.calls import CollectedCalls, Read
from alignedserve.gateway.tools.calls import Piece as CallPiece
from alignedserve.gateway.tools.readers import Reader
from alignedserve.prompt_logprobs import TokenLogprobs

Json = dict[str, Any]


@dataclass
class _Whole:
    """A choice, collected."""

    texts: list[str] = field(default_factory=list)
    # where tools may be called, instead of texts
    calls: CollectedCalls = field(default_factory=CollectedCalls)
    logprobs: Columns = field(default_factory=Columns)
    finish_reason: str | None = None
    # packed
    prompt_logprobs: bytes = b""
    # of its tokens
    num_tokens: int = 0
    sum_logprobs: float = 0.0

    @property
    def likelihood(self) -> float:
        return self.sum_logprobs / max(1, self.num_tokens)


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
    _choices: dict[int, _Whole] = field(default_factory=dict)

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __post_init__(self) -> None:
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"

    # ---- whole ----

    def add(self, delta: Delta) -> None:
        choice = self._choices.setdefault(delta.index, _Whole())
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
        """When everything has been added."""
        choices = sorted(self._given().items())
        body = self._envelope(self.kind) | {"usage": usage.body}
        members = {"choices": array_of(self._whole_choice(index, choice) for index, choice in choices)}
        return object_of(body, members | self._further_members())

    def _add_text(self, choice: _Whole, delta: Delta) -> None:
        choice.texts.append(delta.text)

    def _given(self) -> dict[int, _Whole]:
        """By their numbers in the answer."""
        return self._choices

    def _further_members(self) -> dict[str, Iterable[Piece]]:
        return {}

    def _prompt_logprobs(self, prompt: Sequence[int], packed: bytes) -> dict[str, Iterable[Piece]]:
        """vLLM's field, where asked for."""
        if self.num_prompt_logprobs is None:
            return {}
        positions = prompt_positions(prompt, packed, self.num_prompt_logprobs, self.model.token_text)
        return {"prompt_logprobs": array_of([encode(position)] for position in positions)}

    @abstractmethod
    def _whole_choice(self, index: int, choice: _Whole) -> Iterator[Piece]: ...

    # ---- in chunks ----

    def opening(self, delta: Delta, extra: Json) -> Iterator[Piece] | None:
        """The chunk that goes before a choice's first, where there is one. `extra`: of each chunk."""
        if delta.index in self._lengths:
            return None
        choice = self._opening(delta)
        return choice and object_of(self._envelope(self.chunk_kind) | extra, {"choices": array_of([choice])})

    def chunk(self, delta: Delta, extra: Json) -> Json | None:
        """None for a token without text, unless there is something else to say of it."""
        logprobs = None if self.num_logprobs is None else self._logprobs(delta)
        self._lengths[delta.index] = self._lengths.get(delta.index, 0) + len(delta.text)
        if not (delta.text or logprobs or delta.finish_reason):
            return None
        choices = [self._chunk_choice(delta, logprobs)]
        return self._envelope(self.chunk_kind) | {"choices": choices} | extra

    def usage_chunk(self, usage: Usage) -> Json:
        return self._envelope(self.chunk_kind) | {"choices": [], "usage": usage.body}

    def _opening(self, first: Delta) -> Iterator[Piece] | None:
        """What a choice's stream begins with."""
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
        """Lists, which of later deltas are joined to these."""


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

    def _given(self) -> dict[int, _Whole]:
        if self.num_given == self.num_made:
            return self._choices
        likelihood = {index: choice.likelihood for index, choice in self._choices.items()}
        places = best_places(likelihood, self.num_made, self.num_given)
        return {place: self._choices[index] for index, place in places.items()}

    def _whole_choice(self, index: int, choice: _Whole) -> Iterator[Piece]:
        number = index // self.num_given
        body: Json = {
            "index": index,
            "text": self._echo(number) + "".join(choice.texts),
            "finish_reason": choice.finish_reason,
        }
        members: dict[str, Iterable[Piece]] = {}
        # which come with the first answer to a prompt
        of_prompt = self._choices[number * self.num_made].prompt_logprobs
        if self.num_logprobs is None:
            body["logprobs"] = None
        else:
            members["logprobs"] = self._all_logprobs(number, of_prompt, choice.logprobs)
        members |= self._prompt_logprobs(self.prompts[number], of_prompt)
        return object_of(body, members)

    def _opening(self, first: Delta) -> Iterator[Piece] | None:
        if self.echoes is None:
            return None
        number = first.index // self.num_made
        body: Json = {"index": first.index, "text": self._echo(number), "finish_reason": None}
        if self.num_logprobs is None:
            return object_of(body | {"logprobs": None}, {})
        return object_of(body, {"logprobs": self._all_logprobs(number, first.prompt_logprobs, Columns())})

    def _all_logprobs(self, number: int, packed: bytes, own: Columns) -> Iterator[Piece]:
        """With the echo's."""
        if self.echoes is not None:
            found = Columns()
            of_prompt = echoed_logprobs(
                self.prompts[number],
                packed,
                self.num_logprobs or 0,
                self.model.token_bytes,
                self.model.token_text,
            )
            for some in of_prompt:
                found.add(some)
                yield b""
            found.extend(own)
            own = found
        yield from own.pieces()

    def _echo(self, number: int) -> str:
        """Of a prompt."""
        return "" if self.echoes is None else self.echoes[number]

    def _chunk_choice(self, delta: Delta, logprobs: Json | None) -> Json:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: Delta) -> Json:
        # text appears when its last token does: the offsets of tokens that come together are counted from there
        offset = len(self._echo(delta.index // self.num_made)) + self._lengths.get(delta.index, 0)
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

    def _add_text(self, choice: _Whole, delta: Delta) -> None:
        read = self._read(delta.index, delta.text, delta.finish_reason)
        self._num_calls[delta.index] = choice.calls.add(read)

    def _further_members(self) -> dict[str, Iterable[Piece]]:
        packed = (choice.prompt_logprobs for choice in self._choices.values())
        return self._prompt_logprobs(self.prompts[0], next(filter(None, packed), b""))

    def _whole_choice(self, index: int, choice: _Whole) -> Iterator[Piece]:
        calls = [_call_body(name, arguments) for name, arguments in choice.calls.calls]
        content = choice.calls.content
        message = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        body: Json = {
            "index": index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "finish_reason": self._reason(index, choice.finish_reason),
        }
        if self.num_logprobs is None:
            return object_of(body | {"logprobs": None}, {})
        return object_of(body, {"logprobs": choice.logprobs.pieces()})

    def _opening(self, first: Delta) -> Iterator[Piece] | None:
        role = {"role": "assistant", "content": ""}
        return object_of({"index": first.index, "delta": role, "logprobs": None, "finish_reason": None}, {})

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

    def _piece_bodies(self, index: int, pieces: Sequence[CallPiece]) -> list[Json]:
        bodies = []
        for piece in pieces:
            is_new = piece.name is not None
            self._num_calls[index] = self._num_calls.get(index, 0) + is_new
            arguments = {"function": {"arguments": piece.arguments}}
            body = _call_body(piece.name, piece.arguments) if is_new else arguments
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
        return {"token": text, "logprob": finite(logprob), "bytes": list(its_bytes)}


def _call_body(name: str | None, arguments: str) -> Json:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
