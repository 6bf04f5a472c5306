"""The output of a response: items that grow as the text comes, and the events that tell of it.

Log-probabilities are kept as JSON from the moment they come, and each event is written in pieces: a message can have
tens of megabytes of them, which are in four of its events.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from alignedserve.gateway.http.json_pieces import Json, Piece, encode
from alignedserve.gateway.openai.responses.items import new_id
from alignedserve.gateway.tools.calls import Read

# The places of an item in the bytes of all: where it begins, where its text begins and ends, the same of its
# log-probabilities (both at the end of the text if it has none), and where it ends.
PLACES = 6
# Their type: they are kept as eight bytes each.
_PLACE: Final = "q"


@dataclass(frozen=True)
class Written:
    """JSON that is written already, in pieces. They are joined only when they are sent."""

    pieces: Sequence[Piece]


# The type of an event, and its fields besides the number in the sequence.
Event = tuple[str, dict[str, Any]]


def object_pieces(fields: dict[str, Any]) -> Iterator[Piece]:
    """Writes an object whose values may be Written, or objects that have such values."""
    yield b"{"
    for number, (name, value) in enumerate(fields.items()):
        yield b"," * (number > 0) + encode(name) + b":"
        if isinstance(value, Written):
            yield from value.pieces
        elif isinstance(value, dict):
            yield from object_pieces(value)
        else:
            yield encode(value)
    yield b"}"


def event_pieces(event: Event, number: int) -> Iterator[Piece]:
    """Writes a server-sent event."""
    name, fields = event
    yield b"event: " + name.encode() + b"\ndata: "
    yield from object_pieces({"type": name, "sequence_number": number, **fields})
    yield b"\n\n"


@dataclass(eq=False)
class _Item(ABC):
    index: int
    id: str = ""
    # The text as JSON, without its quotes.
    _text: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> Written:
        return Written((b'"', self._text, b'"'))

    @property
    def place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index}

    @property
    def logprobs(self) -> Written | None:
        """Returns its log-probabilities, if it is of a kind that has some."""
        return None

    @abstractmethod
    def body(self, status: str) -> dict[str, Any]:
        """Returns the item as it is now."""

    @abstractmethod
    def begun(self) -> Iterator[Event]: ...

    def added(self, text: bytes, logprobs: Piece) -> Event:
        """Adds to the item. `text` is JSON without its quotes, `logprobs` are JSON without the brackets."""
        self._text += text
        return self._delta(Written((b'"', text, b'"')), logprobs)

    @abstractmethod
    def _delta(self, text: Written, logprobs: Piece) -> Event: ...

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

    def part(self, text: Written) -> dict[str, Any]:
        return {"type": self.part_kind, "text": text}

    def empty_part(self) -> dict[str, Any]:
        return {"type": self.part_kind, "text": ""}

    def begun(self) -> Iterator[Event]:
        yield (
            "response.output_item.added",
            {"output_index": self.index, "item": self.body("in_progress") | {"content": []}},
        )
        yield "response.content_part.added", self.part_place | {"part": self.empty_part()}

    def _delta(self, text: Written, logprobs: Piece) -> Event:
        return f"{self.events}.delta", self.part_place | {"delta": text}

    def ended(self, status: str) -> Iterator[Event]:
        yield f"{self.events}.done", self.part_place | {"text": self.text}
        yield "response.content_part.done", self.part_place | {"part": self.part(self.text)}
        yield "response.output_item.done", {"output_index": self.index, "item": self.body(status)}


@dataclass(eq=False)
class _Message(_TextItem):
    # JSON, without the brackets.
    _logprobs: bytearray = field(default_factory=bytearray)

    @property
    def logprobs(self) -> Written:
        return Written((b"[", self._logprobs, b"]"))

    def part(self, text: Written) -> dict[str, Any]:
        return super().part(text) | {"annotations": [], "logprobs": self.logprobs}

    def empty_part(self) -> dict[str, Any]:
        return super().empty_part() | {"annotations": [], "logprobs": []}

    def _delta(self, text: Written, logprobs: Piece) -> Event:
        if self._logprobs and logprobs:
            self._logprobs += b","
        self._logprobs += logprobs
        name, event = super()._delta(text, logprobs)
        return name, event | {"logprobs": Written((b"[", logprobs, b"]"))}

    def ended(self, status: str) -> Iterator[Event]:
        for name, event in super().ended(status):
            yield name, event | ({"logprobs": self.logprobs} if name.endswith("text.done") else {})

    def body(self, status: str) -> dict[str, Any]:
        # It is the list of one part.
        content = Written((b"[", *object_pieces(self.part(self.text)), b"]"))
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class _Thoughts(_TextItem):
    events = "response.reasoning_text"
    part_kind = "reasoning_text"

    def body(self, status: str) -> dict[str, Any]:
        content = Written((b"[", *object_pieces(self.part(self.text)), b"]"))
        return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}


@dataclass(eq=False)
class _Call(_Item):
    name: str = ""
    call_id: str = ""

    def body(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
        }

    def begun(self) -> Iterator[Event]:
        item = self.body("in_progress") | {"arguments": ""}
        yield "response.output_item.added", {"output_index": self.index, "item": item}

    def _delta(self, text: Written, logprobs: Piece) -> Event:
        return "response.function_call_arguments.delta", self.place | {"delta": text}

    def ended(self, status: str) -> Iterator[Event]:
        arguments = {"name": self.name, "arguments": self.text}
        yield "response.function_call_arguments.done", self.place | arguments
        yield "response.output_item.done", {"output_index": self.index, "item": self.body(status)}


class Output:
    def __init__(self) -> None:
        # The items that have ended, as JSON with commas between them.
        self._done: list[Piece] = []
        self._places = array(_PLACE)
        self._num_done = 0
        self._num_bytes = 0
        self._open: _Item | None = None
        # The log-probabilities of tokens that have no text yet, as JSON without the brackets.
        self._waiting = bytearray()

    @property
    def items(self) -> Sequence[Piece]:
        """The items that have ended, as JSON with commas between them."""
        return self._done

    @property
    def num_bytes(self) -> int:
        """The size of these."""
        return self._num_bytes

    @property
    def places(self) -> bytes:
        """Where everything is in these: PLACES numbers of each item."""
        return self._places.tobytes()

    def add(self, read: Read, logprobs: Sequence[Json], is_thought: bool = False) -> Iterator[Event]:
        """`logprobs` are those of the tokens that were read: each belongs to the message that has its text, which may
        come later, or to none if it `is_thought`. Must be iterated to its end."""
        if read.reasoning:
            yield from self._go_on(_Thoughts, "reasoning", read.reasoning, b"")
        if read.content or not is_thought:
            self._wait(logprobs)
        if read.content:
            waiting, self._waiting = bytes(self._waiting), bytearray()
            yield from self._go_on(_Message, "message", read.content, waiting)
        for piece in read.pieces:
            if piece.name is not None:
                # What has waited is of the call.
                self._waiting.clear()
                yield from self.end("completed")
                index, call_id = self._num_done, f"call_{secrets.token_hex(12)}"
                name = piece.name
                yield from self._begin(_Call(index, new_id("function_call"), name=name, call_id=call_id))
            if piece.arguments and self._open:
                yield self._open.added(_json_text(piece.arguments), b"")
        if isinstance(self._open, _Call):
            self._waiting.clear()

    def end(self, status: str) -> Iterator[Event]:
        """Ends the item that is open. Must be iterated to its end."""
        if self._open:
            waiting, self._waiting = bytes(self._waiting), bytearray()
            if waiting and isinstance(self._open, _Message):
                yield self._open.added(b"", waiting)
            yield from self._open.ended(status)
            self._keep(self._open, status)
            self._open = None

    def _wait(self, logprobs: Sequence[Json]) -> None:
        more = encode(logprobs)[1:-1]
        if self._waiting and more:
            self._waiting += b","
        self._waiting += more

    def _keep(self, item: _Item, status: str) -> None:
        if self._num_done:
            self._done.append(b",")
            self._num_bytes += 1
        begin = self._num_bytes
        spans: dict[int, tuple[int, int]] = {}
        for piece in object_pieces(item.body(status)):
            # The text and the log-probabilities are found by being the very objects.
            spans[id(piece)] = (self._num_bytes, self._num_bytes + len(piece))
            self._done.append(piece)
            self._num_bytes += len(piece)
        text = spans[id(item.text.pieces[1])]
        logprobs = spans[id(item.logprobs.pieces[1])] if item.logprobs else (text[1], text[1])
        self._places.extend((begin, *text, *logprobs, self._num_bytes))
        self._num_done += 1

    def _go_on(self, kind: type[_TextItem], name: str, text: str, logprobs: bytes) -> Iterator[Event]:
        if not isinstance(self._open, kind):
            yield from self.end("completed")
            yield from self._begin(kind(self._num_done, new_id(name)))
        assert self._open
        yield self._open.added(_json_text(text), logprobs)

    def _begin(self, item: _Item) -> Iterator[Event]:
        self._open = item
        yield from item.begun()


def replayed(items: memoryview, places: Piece) -> Iterator[Event]:
    """Yields the events of items that were kept, each text in one piece."""
    found = array(_PLACE)
    found.frombytes(places)
    for index, first in enumerate(range(0, len(found), PLACES)):
        begin, text_begin, text_end, logprobs_begin, logprobs_end, end = found[first : first + PLACES]
        # An item without its text and its log-probabilities is small.
        spans = (begin, text_begin), (text_end, logprobs_begin), (logprobs_end, end)
        rest = msgspec.json.decode(b"".join(items[first:last] for first, last in spans))
        item = _restored(rest, index)
        yield from item.begun()
        if text_end > text_begin or logprobs_end > logprobs_begin:
            yield item.added(bytes(items[text_begin:text_end]), items[logprobs_begin:logprobs_end])
        yield from item.ended(rest["status"])


def _restored(item: Json, index: int) -> _Item:
    match item["type"]:
        case "message":
            return _Message(index, item["id"])
        case "reasoning":
            return _Thoughts(index, item["id"])
    return _Call(index, item["id"], name=item["name"], call_id=item["call_id"])


def _json_text(text: str) -> bytes:
    """Returns the JSON of a text without its quotes."""
    return encode(text)[1:-1]


def run(events: Iterator[Any]) -> None:
    """Takes all events, where nobody wants them."""
    for _ in events:
        pass
