"""JSON of any size as it is sent: in pieces, some of which may still be in the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.gateway.http.json_pieces import Piece, encode
from alignedserve.store import Part


@dataclass(frozen=True)
class Stored:
    """Bytes of a response's part, which are read when they are sent."""

    part: Part
    begin: int
    end: int


AnyPiece = Piece | Stored


@dataclass(frozen=True)
class Written:
    """JSON that is written already, in pieces. They are joined only when they are sent."""

    pieces: Sequence[AnyPiece]


# The type of an event, and its fields besides the number in the sequence.
Event = tuple[str, dict[str, Any]]


def object_pieces(fields: dict[str, Any]) -> Iterator[AnyPiece]:
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


def event_pieces(event: Event, number: int) -> Iterator[AnyPiece]:
    """Writes a server-sent event: in one go, if all of it is small, as there is such an event for each token."""
    name, fields = event
    given = {"type": name, "sequence_number": number, **fields}
    yield b"event: " + name.encode() + b"\ndata: "
    if any(isinstance(value, Written | dict) for value in fields.values()):
        yield from object_pieces(given)
    else:
        yield encode(given)
    yield b"\n\n"


def response_pieces(state: bytes, output: Sequence[AnyPiece], repeated: AnyPiece) -> Iterator[AnyPiece]:
    """Writes OpenAI's object. `state` is a JSON object, `output` is JSON without the brackets, and `repeated` an object
    without the bracket that it begins with."""
    yield state[:-1] + b',"output":['
    yield from output
    yield b"],"
    yield repeated
