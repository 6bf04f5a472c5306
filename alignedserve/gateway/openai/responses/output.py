"""The output of a response: items that grow as the text comes, and the events that tell of it."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from alignedserve.gateway.http.json_pieces import Json
from alignedserve.gateway.openai.responses.items import new_id
from alignedserve.gateway.tools.calls import Read

# The type of an event, and its fields besides the number in the sequence.
Event = tuple[str, Json]


@dataclass(eq=False)
class _Item(ABC):
    index: int
    id: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index}

    @abstractmethod
    def body(self, status: str) -> Json:
        """Returns the item as it is now."""

    @abstractmethod
    def begun(self) -> Iterator[Event]: ...

    @abstractmethod
    def added(self, text: str, logprobs: Sequence[Json]) -> Event: ...

    @abstractmethod
    def ended(self, status: str) -> Iterator[Event]: ...


class _TextItem(_Item):
    """An item with one part, which is text."""

    # The name of the events of its text, and the type of its part.
    events = "response.output_text"
    part_kind = "output_text"

    @property
    def part_place(self) -> Json:
        return self.place | {"content_index": 0}

    def part(self, text: str) -> Json:
        return {"type": self.part_kind, "text": text}

    def begun(self) -> Iterator[Event]:
        yield (
            "response.output_item.added",
            {"output_index": self.index, "item": self.body("in_progress") | {"content": []}},
        )
        yield "response.content_part.added", self.part_place | {"part": self.part("")}

    def added(self, text: str, logprobs: Sequence[Json]) -> Event:
        self.parts.append(text)
        return f"{self.events}.delta", self.part_place | {"delta": text}

    def ended(self, status: str) -> Iterator[Event]:
        text = self.text
        yield f"{self.events}.done", self.part_place | {"text": text}
        yield "response.content_part.done", self.part_place | {"part": self.part(text)}
        yield "response.output_item.done", {"output_index": self.index, "item": self.body(status)}


@dataclass(eq=False)
class _Message(_TextItem):
    logprobs: list[Json] = field(default_factory=list)

    def part(self, text: str) -> Json:
        return super().part(text) | {"annotations": [], "logprobs": self.logprobs if text else []}

    def added(self, text: str, logprobs: Sequence[Json]) -> Event:
        self.logprobs += logprobs
        name, event = super().added(text, logprobs)
        return name, event | {"logprobs": list(logprobs)}

    def ended(self, status: str) -> Iterator[Event]:
        for name, event in super().ended(status):
            yield name, event | ({"logprobs": self.logprobs} if name.endswith("text.done") else {})

    def body(self, status: str) -> Json:
        content = [self.part(self.text)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class _Thoughts(_TextItem):
    events = "response.reasoning_text"
    part_kind = "reasoning_text"

    def body(self, status: str) -> Json:
        content = [self.part(self.text)]
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}


@dataclass(eq=False)
class _Call(_Item):
    name: str = ""
    call_id: str = ""

    def body(self, status: str) -> Json:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
        }

    def begun(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self.index, "item": self.body("in_progress")}

    def added(self, text: str, logprobs: Sequence[Json]) -> Event:
        self.parts.append(text)
        return "response.function_call_arguments.delta", self.place | {"delta": text}

    def ended(self, status: str) -> Iterator[Event]:
        arguments = {"name": self.name, "arguments": self.text}
        yield "response.function_call_arguments.done", self.place | arguments
        yield "response.output_item.done", {"output_index": self.index, "item": self.body(status)}


class Output:
    def __init__(self) -> None:
        self._done: list[Json] = []
        self._open: _Item | None = None

    @property
    def items(self) -> list[Json]:
        """The items that have ended."""
        return self._done

    def add(self, read: Read, logprobs: Sequence[Json]) -> Iterator[Event]:
        """Must be iterated to its end."""
        if read.reasoning:
            yield from self._go_on(_Thoughts, "reasoning", read.reasoning, ())
        if read.content:
            yield from self._go_on(_Message, "message", read.content, logprobs)
        for piece in read.pieces:
            if piece.name is not None:
                yield from self.end("completed")
                index, call_id = len(self._done), f"call_{secrets.token_hex(12)}"
                yield from self._begin(_Call(index, new_id("function_call"), [], piece.name, call_id))
            if piece.arguments and self._open:
                yield self._open.added(piece.arguments, ())

    def end(self, status: str) -> Iterator[Event]:
        """Ends the item that is open. Must be iterated to its end."""
        if self._open:
            yield from self._open.ended(status)
            self._done.append(self._open.body(status))
            self._open = None

    def _go_on(
        self, kind: type[_TextItem], name: str, text: str, logprobs: Sequence[Json]
    ) -> Iterator[Event]:
        if not isinstance(self._open, kind):
            yield from self.end("completed")
            yield from self._begin(kind(len(self._done), new_id(name)))
        assert self._open
        yield self._open.added(text, logprobs)

    def _begin(self, item: _Item) -> Iterator[Event]:
        self._open = item
        yield from item.begun()


def run(events: Iterator[Any]) -> None:
    """Takes all events, where nobody wants them."""
    for _ in events:
        pass
