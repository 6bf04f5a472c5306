"""Builds Anthropic's message, whole or as its events: blocks of reasoning, text and calls, one after another.

Anthropic's clients parse a call's arguments as they arrive, and end the stream with an error if they are no JSON. So
arguments are sent when the call is complete, as in Anthropic's API, unless its tool is to be streamed eagerly.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from alignedserve.gateway.generation.call import CallContext, ChoiceDelta, ResponseBuilder, TokenUsage
from alignedserve.gateway.generation.chat import TextSpec
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Json, Piece, encode, event_named
from alignedserve.gateway.tools.calls import arguments_of
from alignedserve.gateway.tools.readers import (
    CallPiece,
    CollectedText,
    ContentPiece,
    Read,
    ThoughtPiece,
)

# The tiers' names in Anthropic's answers.
_TIERS = {"default": "standard", "priority": "priority", "flex": "batch"}

# The name of an event, and its fields besides the type.
Event = tuple[str, Json]


class MessageSpec(TextSpec, frozen=True, kw_only=True):
    # Whether calls of a tool are streamed as the model writes them, by tool name. None: as the request's header says.
    eagerness: dict[str, bool | None]
    # Whether the request's header asks for it.
    is_eager: bool = False

    def builder(self, answering: CallContext) -> MessageBuilder:
        return MessageBuilder(answering, self)

    def streams_eagerly(self, tool: str) -> bool:
        asked = self.eagerness.get(tool, False)
        return self.is_eager if asked is None else asked


@dataclass
class MessageBuilder(ResponseBuilder):
    answering: CallContext
    spec: MessageSpec
    # The received parts of a message that is sent whole.
    _collected: CollectedText = field(default_factory=CollectedText)
    # The type of the open block of a stream, and the number of blocks so far.
    _open: str | None = None
    _num_blocks: int = 0
    # The received arguments of the open call, if they are sent when it is complete. None: they are not held.
    _held: list[str] | None = None
    _has_calls: bool = False
    _finish_reason: str | None = None
    _stop_string: str | None = None
    _is_begun: bool = False

    def __post_init__(self) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self._reader = self.spec.reading.new_reader()

    # ---- whole ----

    def add(self, delta: ChoiceDelta) -> None:
        self._collected.add(self._read(delta))

    def whole(self, usage: TokenUsage) -> Iterator[Piece]:
        blocks: list[Json] = []
        if self._collected.reasoning:
            blocks.append({"type": "thinking", "thinking": self._collected.reasoning, "signature": ""})
        if self._collected.content or not self._collected.calls:
            blocks.append({"type": "text", "text": self._collected.content})
        for name, arguments in self._collected.calls:
            given = arguments_of(arguments)
            blocks.append({"type": "tool_use", "id": _new_call_id(), "name": name, "input": given})
        yield encode(self._envelope(usage) | {"content": blocks, **self._end()})

    # ---- as events ----

    def opening(self, delta: ChoiceDelta, usage: TokenUsage) -> Iterable[Piece] | None:
        if self._is_begun:
            return None
        self._is_begun = True
        message = self._envelope(usage) | {"content": [], "stop_reason": None, "stop_sequence": None}
        return [_written("message_start", {"message": message}), _written("ping", {})]

    def events(self, delta: ChoiceDelta, usage: TokenUsage) -> bytes:
        return b"".join(_written(*event) for event in self._events(self._read(delta)))

    def end(self, usage: TokenUsage) -> Iterable[Piece]:
        if not self._num_blocks:
            # An answer without text has an empty text block, as it has when it is not streamed.
            yield from (_written(*event) for event in self._begin("text", {"text": ""}))
        yield from (_written(*event) for event in self._close())
        yield _written("message_delta", {"delta": self._end(), "usage": _usage(usage)})
        yield _written("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        return event_named("error", error.anthropic_body)

    def _events(self, read: Read) -> Iterator[Event]:
        """Yields events. Must be iterated to its end."""
        for part in read.parts:
            match part:
                case ThoughtPiece(text):
                    yield from self._begin("thinking", {"thinking": "", "signature": ""})
                    yield self._delta({"type": "thinking_delta", "thinking": text})
                case ContentPiece(text):
                    yield from self._begin("text", {"text": ""})
                    yield self._delta({"type": "text_delta", "text": text})
                case CallPiece(name, arguments):
                    yield from self._called(name, arguments)

    def _called(self, name: str | None, arguments: str) -> Iterator[Event]:
        """Yields events. Must be iterated to its end."""
        if name is not None:
            yield from self._close()
            yield from self._begin("tool_use", {"id": _new_call_id(), "name": name, "input": {}})
            self._held = None if self.spec.streams_eagerly(name) else []
        if arguments:
            yield self._argued(arguments)

    def _argued(self, arguments: str) -> Event:
        if self._held is None:
            return self._arguments(arguments)
        self._held.append(arguments)
        # Keeps the connection alive while arguments are held.
        return "ping", {}

    def _begin(self, kind: str, block: Json) -> Iterator[Event]:
        """Begins a block, unless one of this kind is open. Must be iterated to its end."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        self._num_blocks += 1
        yield "content_block_start", {"index": self._num_blocks - 1, "content_block": {"type": kind, **block}}

    def _close(self) -> Iterator[Event]:
        if self._held:
            yield self._arguments(encode(arguments_of("".join(self._held))).decode())
        self._held = None
        if self._open is not None:
            self._open = None
            yield "content_block_stop", {"index": self._num_blocks - 1}

    def _arguments(self, text: str) -> Event:
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def _delta(self, delta: Json) -> Event:
        return "content_block_delta", {"index": self._num_blocks - 1, "delta": delta}

    # ---- both ----

    def _read(self, delta: ChoiceDelta) -> Read:
        read = self._reader.feed(delta.text)
        if delta.finish_reason is not None:
            self._finish_reason, self._stop_string = delta.finish_reason, delta.stop_string
            read.add(self._reader.end(is_cut=delta.is_cut))
        if not self.spec.shows_reasoning:
            read.drop_thoughts()
        self._has_calls |= bool(read.pieces)
        return read

    def _envelope(self, usage: TokenUsage) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.answering.model.name,
            "usage": _usage(usage) | {"service_tier": _TIERS[self.answering.tier]},
        }

    def _end(self) -> Json:
        reason = "end_turn"
        if self._finish_reason == "length":
            reason = "max_tokens"
        elif self._has_calls:
            reason = "tool_use"
        elif self._stop_string is not None:
            reason = "stop_sequence"
        return {
            "stop_reason": reason,
            "stop_sequence": self._stop_string if reason == "stop_sequence" else None,
        }


def _usage(usage: TokenUsage) -> Json:
    return {
        # Without cached tokens, as in Anthropic's API.
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_completion_tokens,
    }


def _new_call_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


def _written(name: str, fields: Json) -> bytes:
    return event_named(name, {"type": name, **fields})
