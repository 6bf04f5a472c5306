"""The events of a stored response: those that its stream would have had, with each text in one piece. Large parts are
read when they are sent, once for each event that has them."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec

from alignedserve.gateway.http.json_pieces import encode
from alignedserve.gateway.openai.responses.output import PLACE, PLACES
from alignedserve.gateway.openai.responses.output_items import OutputItem, restored
from alignedserve.gateway.openai.responses.written import (
    AnyPiece,
    Event,
    StoredSpan,
    WrittenText,
    event_pieces,
    response_pieces,
)
from alignedserve.store import Part, ResponseHead

# Parts above this size are not read before they are sent.
SMALL_BYTES = 64 << 10
# Bytes of places that are read at a time.
_STEP_BYTES = 1024 * PLACES * array(PLACE).itemsize

# Returns the bytes of a part between two places.
Read = Callable[[Part, int, int], Awaitable[bytes]]


async def written(head: ResponseHead, read: Read, after: int = -1) -> AsyncIterator[Sequence[AnyPiece]]:
    """Yields the events of a response that has ended, with numbers above `after`."""
    number = 0
    async for event in _events_of(head, read):
        if number > after:
            yield [*event_pieces(event, number)]
        number += 1


async def _events_of(head: ResponseHead, read: Read) -> AsyncIterator[Event]:
    now = msgspec.json.decode(head.state)
    early = encode(now | {"status": "in_progress", "usage": None, "completed_at": None})
    repeated: AnyPiece = StoredSpan("repeated", 1, head.size_of("repeated"))
    if head.size_of("repeated") <= SMALL_BYTES:
        repeated = await read("repeated", 1, head.size_of("repeated"))
    begun = WrittenText([*response_pieces(early, (), repeated)])
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    async for item, status in _items_of(head, read):
        for event in item.begun():
            yield event
        if not _is_empty(item.text) or not _is_empty(item.logprobs):
            yield item.added()
        for event in item.ended(status):
            yield event
    name = "failed" if now["status"] == "cancelled" else now["status"]
    output = StoredSpan("output", 0, head.size_of("output"))
    yield f"response.{name}", {"response": WrittenText([*response_pieces(head.state, [output], repeated)])}


async def _items_of(head: ResponseHead, read: Read) -> AsyncIterator[tuple[OutputItem, str]]:
    """Yields the items, and the status of each."""
    index, num_bytes = 0, head.size_of("places")
    for first in range(0, num_bytes, _STEP_BYTES):
        places = array(PLACE)
        places.frombytes(await read("places", first, min(first + _STEP_BYTES, num_bytes)))
        for at in range(0, len(places), PLACES):
            yield await _item(places[at : at + PLACES], index, read)
            index += 1


async def _item(places: Sequence[int], index: int, read: Read) -> tuple[OutputItem, str]:
    begin, text_begin, text_end, logprobs_begin, logprobs_end, end = places
    # An item without its text and its log-probabilities is small.
    spans = (begin, text_begin), (text_end, logprobs_begin), (logprobs_end, end)
    text: bytearray | StoredSpan = StoredSpan("output", text_begin, text_end)
    logprobs: bytearray | StoredSpan = StoredSpan("output", logprobs_begin, logprobs_end)
    if end - begin <= SMALL_BYTES:
        whole = await read("output", begin, end)
        rest = [whole[first - begin : last - begin] for first, last in spans]
        text = bytearray(whole[text_begin - begin : text_end - begin])
        logprobs = bytearray(whole[logprobs_begin - begin : logprobs_end - begin])
    else:
        rest = [await read("output", first, last) for first, last in spans]
    item = msgspec.json.decode(b"".join(rest))
    return restored(item, index, text, logprobs), item["status"]


def _is_empty(piece: bytearray | StoredSpan) -> bool:
    return piece.begin == piece.end if isinstance(piece, StoredSpan) else not piece
