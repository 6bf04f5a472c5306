"""The parts of an answer that only chats have: a role, reasoning and tool calls parsed from the text, and a list of
token log-probabilities."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from alignedserve.gateway.generation.generation import ChoiceDelta, TokenUsage
from alignedserve.gateway.http.json_pieces import Json, Piece, object_of
from alignedserve.gateway.openai.choices_builder import ChoicesBuilder, CollectedChoice
from alignedserve.gateway.openai.token_logprobs import chat_logprobs
from alignedserve.gateway.tools.readers import CallPiece, Read, Reader, TextReader


@dataclass
class ChatResponseBuilder(ChoicesBuilder):
    # Makes a reader for the text of a choice.
    new_reader: Callable[[], Reader] = TextReader
    # Whether the answer includes the reasoning.
    shows_reasoning: bool = True
    _readers: dict[int, Reader] = field(default_factory=dict)
    # The number of calls in each choice.
    _num_calls: dict[int, int] = field(default_factory=dict)
    # The ids of calls, with their choices' numbers.
    _call_ids: set[tuple[int, str]] = field(default_factory=set)
    # Reasoning tokens of all choices. None: no output has reasoning.
    _num_reasoning_tokens: int | None = None

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._may_think = self.shows_reasoning and self.new_reader().is_thinking is not None

    def _add_text(self, choice: CollectedChoice, delta: ChoiceDelta) -> None:
        self._num_calls[delta.index] = choice.text.add(self._read(delta))

    def _further_members(self) -> dict[str, Iterable[Piece]]:
        packed = (choice.prompt_logprobs for choice in self._choices.values())
        prompt = self.prompts[0]
        return self._prompt_logprobs(prompt, next(filter(None, packed), b"")) | self._prompt_ids(prompt)

    def _whole_choice(self, index: int, choice: CollectedChoice) -> Iterator[Piece]:
        found = zip(choice.text.calls, choice.text.call_ids, strict=True)
        calls = [self._call_body(index, name, arguments, call_id) for (name, arguments), call_id in found]
        content, reasoning = choice.text.content, choice.text.reasoning
        message: Json = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        } | self._thoughts(reasoning)
        body: Json = {
            "index": index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "finish_reason": self._reason(index, choice.finish_reason),
        }
        if self.num_logprobs is None:
            return object_of(body | {"logprobs": None}, choice.token_ids.members())
        return object_of(body, {"logprobs": choice.logprobs.pieces()} | choice.token_ids.members())

    def _opening(self, first: ChoiceDelta) -> Iterator[Piece] | None:
        role = {"role": "assistant", "content": ""} | self._thoughts("")
        return object_of({"index": first.index, "delta": role, "logprobs": None, "finish_reason": None}, {})

    def _opening_members(self) -> dict[str, Iterable[Piece]]:
        return self._prompt_ids(self.prompts[0])

    def _chunk_choice(self, delta: ChoiceDelta, logprobs: Json | None) -> Json:
        read = self._read(delta)
        new: Json = {"content": read.content} if read.content or logprobs else {}
        new |= self._thoughts(read.reasoning)
        if read.pieces:
            new["tool_calls"] = self._piece_bodies(delta.index, read.pieces)
        return {
            "index": delta.index,
            "delta": new,
            "logprobs": logprobs,
            "finish_reason": self._reason(delta.index, delta.finish_reason),
        }

    def _thoughts(self, text: str) -> Json:
        """Returns the reasoning under both names that clients read: DeepSeek's and SGLang's, and OpenRouter's and
        vLLM's. Empty reasoning is null: clients look the fields up in each chunk. No fields, if the model can't
        reason."""
        return {"reasoning_content": text or None, "reasoning": text or None} if self._may_think else {}

    def _has_news(self, choice: Json) -> bool:
        return any(choice["delta"].values())

    def _read(self, delta: ChoiceDelta) -> Read:
        reader = self._readers.get(delta.index)
        if reader is None:
            reader = self._readers[delta.index] = self.new_reader()
        read = Read()
        for text, num_tokens in delta.steps():
            read.add(reader.feed(text))
            if reader.is_thinking is not None:
                num_thoughts = num_tokens if reader.is_thinking else 0
                self._num_reasoning_tokens = (self._num_reasoning_tokens or 0) + num_thoughts
        if delta.finish_reason is not None:
            read.add(reader.end(is_cut=delta.is_cut))
        if not self.shows_reasoning:
            read.drop_thoughts()
        return read

    def _piece_bodies(self, index: int, pieces: Sequence[CallPiece]) -> list[Json]:
        bodies = []
        for piece in pieces:
            is_new = piece.name is not None
            self._num_calls[index] = self._num_calls.get(index, 0) + is_new
            arguments = {"function": {"arguments": piece.arguments}}
            body = self._call_body(index, piece.name, piece.arguments, piece.id) if is_new else arguments
            bodies.append({"index": self._num_calls[index] - 1} | body)
        return bodies

    def _call_body(self, index: int, name: str | None, arguments: str, call_id: str | None) -> Json:
        """Keeps an id that the model has written, once per choice. The client sends it back with the call's result, and
        the template may show nothing else of the call."""
        if call_id is None or (index, call_id) in self._call_ids:
            call_id = f"call_{secrets.token_hex(12)}"
        self._call_ids.add((index, call_id))
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _reason(self, index: int, finish_reason: str | None) -> str | None:
        if finish_reason == "stop" and self._num_calls.get(index):
            return self._readers[index].stop_reason
        return finish_reason

    def _usage(self, usage: TokenUsage) -> Json:
        if self._num_reasoning_tokens is None:
            return usage.body
        return usage.body | {"completion_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens}}

    def _logprobs(self, delta: ChoiceDelta) -> Json:
        return {"content": chat_logprobs(delta.token_ids, delta.logprobs, self.model)}
