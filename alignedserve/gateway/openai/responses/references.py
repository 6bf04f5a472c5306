"""Finds stored items by their ids alone: an id contains that of the response or conversation to which it belongs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Piece, encode
from alignedserve.gateway.openai.responses.conversations import MAX_LOOKS
from alignedserve.gateway.openai.responses.items import place_of
from alignedserve.gateway.openai.responses.output import PLACE, PLACES
from alignedserve.store import (
    ConversationHead,
    ConversationId,
    Part,
    ResponseGone,
    ResponseHead,
    ResponseId,
    ResponseStore,
)
from alignedserve.store.responses import Span

# Responses that a conversation may have, and responses and conversations that a call may refer to. Each of them is read
# for the next turn.
MAX_TURNS = 512

# Called with the size of an item before it is read. Raises ApiError if that is too much.
Admit = Callable[[int], None]


async def stored_items(
    store: ResponseStore | None, names: Sequence[str], owner: str, admit: Admit
) -> list[list[Piece]]:
    """Returns the items with these ids as JSON, each in pieces. Those that the owner does not have are left out. Raises
    ApiError and StoreAway."""
    by_stem: dict[str, dict[str, int | None]] = {}
    for name in names:
        if place := place_of(name):
            by_stem.setdefault(place[0], {})[name] = place[1]
    if len(by_stem) > MAX_TURNS:
        message = f"input: references to items of more than {MAX_TURNS} responses and conversations"
        raise ApiError(400, message, param="input")
    found = []
    for stem, places in by_stem.items() if store else ():
        assert store
        head = await store.head(ResponseId(f"resp_{stem}"))
        looked_up: Sequence[list[Piece] | None] = []
        if head is None:
            looked_up = [await _from_conversation(store, stem, name, owner, admit) for name in places]
        elif head.owner == owner:
            looked_up = await _from_response(store, head, places, admit)
        found += [item for item in looked_up if item]
    return found


# ---- of responses ----------------------------------------------------------------------------------------------------


async def _from_response(
    store: ResponseStore, head: ResponseHead, numbers: dict[str, int | None], admit: Admit
) -> list[list[Piece]]:
    """Returns the items with these ids. Each has its number in the output, or None if it is of the input."""

    async def read(part: Part, *spans: Span) -> list[Piece]:
        return [piece for span in spans async for piece in store.pieces(head, part, *span)]

    async def whole(part: Part) -> bytes:
        return b"".join(await read(part, (0, head.size_of(part))))

    found = []
    try:
        places = await whole("places") if any(number is not None for number in numbers.values()) else b""
        inputs = _spans_in(await whole("item_index")) if None in numbers.values() else {}
        for name, number in numbers.items():
            part: Part = "input_items" if number is None else "output"
            spans = [inputs.get(encode(name), (0, 0))] if number is None else _spans_at(places, number)
            if any(end > begin for begin, end in spans):
                admit(sum(end - begin for begin, end in spans))
                found.append(await read(part, *spans))
    except ResponseGone:
        # It was deleted meanwhile.
        return []
    return found


def _spans_at(places: bytes, number: int) -> list[Span]:
    """Returns the spans of an output item without its log-probabilities. Empty: there is no such item."""
    numbers = array(PLACE)
    numbers.frombytes(places)
    found = numbers[PLACES * number : PLACES * (number + 1)]
    if not found:
        return []
    begin, _, _, logprobs_begin, logprobs_end, end = found
    return [(begin, logprobs_begin), (logprobs_end, end)]


def _spans_in(index: bytes) -> dict[bytes, Span]:
    """Returns the spans of input items by their ids as JSON (items.index_of)."""
    spans, begin = {}, 0
    for line in index.splitlines():
        stop, _, name = line.partition(b" ")
        spans[name] = begin, int(stop)
        # There is a comma between items.
        begin = int(stop) + 1
    return spans


# ---- of conversations ------------------------------------------------------------------------------------------------


async def _from_conversation(
    store: ResponseStore, stem: str, name: str, owner: str, admit: Admit
) -> list[Piece] | None:
    for _ in range(MAX_LOOKS):
        head = await store.conversations.head(ConversationId(f"conv_{stem}"))
        if head is None or head.owner != owner:
            break
        try:
            return await _item_in(store, head, name, admit)
        except ResponseGone:
            continue
    return None


async def _item_in(
    store: ResponseStore, head: ConversationHead, name: str, admit: Admit
) -> list[Piece] | None:
    span = await store.conversations.item(head, encode(name))
    if span is None:
        return None
    admit(span[1] - span[0])
    return [piece async for piece in store.conversations.pieces(head, *span)]
