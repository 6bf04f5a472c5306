"""The items of a response's output. They grow as text arrives, and each has its events.

Log-probabilities are JSON from the start, and large events are written in pieces: a message may have tens of megabytes
of log-probabilities, which are in four of its events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from msgspec import Raw

from alignedserve.gateway.http.json_pieces import Json
from alignedserve.gateway.openai.responses.written import Event, StoredSpan, WrittenText, object_pieces


@dataclass(eq=False)
class OutputItem(ABC):
    index: int
    id: str
    # The text as JSON, without its quotes.
    text: bytearray | StoredSpan = field(default_factory=bytearray)
    # The log-probabilities of a message, as JSON without the brackets. Other items have none.
    logprobs: bytearray | StoredSpan = field(default_factory=bytearray)

    @property
    def place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index}

    @property
    def whole_text(self) -> WrittenText:
        return WrittenText((b'"', self.text, b'"'))

    @property
    def all_logprobs(self) -> WrittenText:
        return WrittenText((b"[", self.logprobs, b"]"))

    @abstractmethod
    def body(self, status: str) -> dict[str, Any]:
        """Returns the item as it is now."""

    @abstractmethod
    def begun(self) -> Iterator[Event]: ...

    def add(self, text: bytes, logprobs: bytes = b"") -> Event:
        """Extends an item that is not stored, and returns the event. `text` is JSON without its quotes, `logprobs` is
        JSON without the brackets."""
        assert isinstance(self.text, bytearray) and isinstance(self.logprobs, bytearray)
        self.text += text
        if self.logprobs and logprobs:
            self.logprobs += b","
        self.logprobs += logprobs
        return self._delta(Raw(b'"%b"' % text), Raw(b"[%b]" % logprobs))

    def added(self) -> Event:
        """Returns the event that adds the whole text."""
        return self._delta(self.whole_text, self.all_logprobs)

    @abstractmethod
    def _delta(self, text: Raw | WrittenText, logprobs: Raw | WrittenText) -> Event: ...

    @abstractmethod
    def ended(self, status: str) -> Iterator[Event]: ...


class TextItem(OutputItem):
    """An item with one part, which is text."""

    kind: ClassVar[str]
    # Its fields besides that part.
    more: ClassVar[Json]
    # The prefix of its text's events, and the type of its part.
    events: ClassVar[str]
    part_kind: ClassVar[str]

    @property
    def part_place(self) -> Json:
        return self.place | {"content_index": 0}

    def part(self, text: str | WrittenText, logprobs: list[Any] | WrittenText) -> dict[str, Any]:
        return {"type": self.part_kind, "text": text}

    def beside_text(self, logprobs: Raw | WrittenText) -> dict[str, Any]:
        """Returns further fields of its text's events."""
        return {}

    def body(self, status: str) -> dict[str, Any]:
        part = self.part(self.whole_text, self.all_logprobs)
        content = WrittenText((b"[", *object_pieces(part), b"]"))
        return {"id": self.id, "type": self.kind, "status": status, **self.more, "content": content}

    def begun(self) -> Iterator[Event]:
        item = self.body("in_progress") | {"content": []}
        yield "response.output_item.added", {"output_index": self.index, "item": item}
        yield "response.content_part.added", self.part_place | {"part": self.part("", [])}

    def _delta(self, text: Raw | WrittenText, logprobs: Raw | WrittenText) -> Event:
        return f"{self.events}.delta", self.part_place | {"delta": text} | self.beside_text(logprobs)

    def ended(self, status: str) -> Iterator[Event]:
        text, logprobs = self.whole_text, self.all_logprobs
        yield f"{self.events}.done", self.part_place | {"text": text} | self.beside_text(logprobs)
        yield "response.content_part.done", self.part_place | {"part": self.part(text, logprobs)}
        yield "response.output_item.done", {"output_index": self.index, "item": self.body(status)}


class Message(TextItem):
    kind, more = "message", {"role": "assistant"}
    events, part_kind = "response.output_text", "output_text"

    def part(self, text: str | WrittenText, logprobs: list[Any] | WrittenText) -> dict[str, Any]:
        return super().part(text, logprobs) | {"annotations": [], "logprobs": logprobs}

    def beside_text(self, logprobs: Raw | WrittenText) -> dict[str, Any]:
        return {"logprobs": logprobs}


class ReasoningItem(TextItem):
    kind, more = "reasoning", {"summary": []}
    events, part_kind = "response.reasoning_text", "reasoning_text"


@dataclass(eq=False)
class CallItem(OutputItem):
    name: str = ""
    call_id: str = ""

    def body(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.whole_text,
        }

    def begun(self) -> Iterator[Event]:
        item = self.body("in_progress") | {"arguments": ""}
        yield "response.output_item.added", {"output_index": self.index, "item": item}

    def _delta(self, text: Raw | WrittenText, logprobs: Raw | WrittenText) -> Event:
        return "response.function_call_arguments.delta", self.place | {"delta": text}

    def ended(self, status: str) -> Iterator[Event]:
        arguments = {"name": self.name, "arguments": self.whole_text}
        yield "response.function_call_arguments.done", self.place | arguments
        yield "response.output_item.done", {"output_index": self.index, "item": self.body(status)}


def restored(
    item: Json, index: int, text: bytearray | StoredSpan, logprobs: bytearray | StoredSpan
) -> OutputItem:
    """Returns a stored item. `item` has all of it but the text and the log-probabilities."""
    match item["type"]:
        case "message":
            return Message(index, item["id"], text, logprobs)
        case "reasoning":
            return ReasoningItem(index, item["id"], text)
    return CallItem(index, item["id"], text, name=item["name"], call_id=item["call_id"])
