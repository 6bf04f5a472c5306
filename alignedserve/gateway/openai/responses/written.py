"""JSON of any size on its way to a client: in pieces, some of which may still be in the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.gateway.http.json_pieces import Piece, encode
from alignedserve.store import Part


@dataclass(frozen=True)
class StoredSpan:
    """Bytes of a response's stored part, which are read when they are sent."""

    part: Part
    begin: int
    end: int


AnyPiece = Piece | StoredSpan


@dataclass(frozen=True)
class WrittenText:
    """JSON text in pieces, which are joined only when they are sent."""

    pieces: Sequence[AnyPiece]


# The type of an event, and its fields besides the sequence number.
Event = tuple[str, dict[str, Any]]


def object_pieces(fields: dict[str, Any]) -> Iterator[AnyPiece]:
    """Writes an object with values that may be Written, or objects with such values."""
    yield b"{"
    for number, (name, value) in enumerate(fields.items()):
        yield b"," * (number > 0) + encode(name) + b":"
        if isinstance(value, WrittenText):
            yield from value.pieces
        elif isinstance(value, dict):
            yield from object_pieces(value)
        else:
            yield encode(value)
    yield b"}"


def event_pieces(event: Event, number: int) -> Iterator[AnyPiece]:
    """Writes a server-sent event. Small events, of which there is one per token, are encoded at once."""
    name, fields = event
    given = {"type": name, "sequence_number": number, **fields}
    yield b"event: " + name.encode() + b"\ndata: "
    if any(isinstance(value, WrittenText | dict) for value in fields.values()):
        yield from object_pieces(given)
    else:
        yield encode(given)
    yield b"\n\n"


def response_pieces(state: bytes, output: Sequence[AnyPiece], repeated: AnyPiece) -> Iterator[AnyPiece]:
    """Writes OpenAI's object. `state` is a JSON object, `output` is JSON without the brackets, and `repeated` is an
    object without its opening bracket."""
    yield state[:-1] + b',"output":['
    yield from output
    yield b"],"
    yield repeated
