"""The events of a response that is kept: the sequence that a stream would have had, with each text in one piece."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from alignedserve.gateway.http.json_pieces import Piece, encode
from alignedserve.gateway.openai.responses.builder import response_pieces
from alignedserve.gateway.openai.responses.output import Event, Written, event_pieces, replayed


def events_of(state: bytes, output: memoryview, places: Piece, repeated: Piece) -> Iterator[Event]:
    """Yields the events of a response which is over."""
    now = msgspec.json.decode(state)
    early = encode(now | {"status": "in_progress", "usage": None, "completed_at": None})
    begun = Written([*response_pieces(early, (), repeated)])
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    yield from replayed(output, places)
    name = "failed" if now["status"] == "cancelled" else now["status"]
    yield f"response.{name}", {"response": Written([*response_pieces(state, [output], repeated)])}


def written(
    state: bytes, output: memoryview, places: Piece, repeated: Piece, after: int = -1
) -> Iterator[Piece]:
    """Yields the events with higher numbers than `after`."""
    for number, event in enumerate(events_of(state, output, places, repeated)):
        if number > after:
            yield from event_pieces(event, number)
