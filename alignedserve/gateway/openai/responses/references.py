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
    ConversationStore,
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

# Called with the size of items before they are read. Raises ApiError if that is too much. If they can't be read, it is
# called with the negative size.
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
    found: list[list[Piece]] = []
    for stem, places in by_stem.items() if store else ():
        assert store
        head = await store.head(ResponseId(f"resp_{stem}"))
        if head is None:
            found += await _from_conversation(store, stem, [*places], owner, admit)
        elif head.owner == owner:
            found += await _from_response(store, head, places, admit)
    return found


# ---- of responses ----------------------------------------------------------------------------------------------------


async def _from_response(
    store: ResponseStore, head: ResponseHead, numbers: dict[str, int | None], admit: Admit
) -> list[list[Piece]]:
    """Returns the items with these ids. Each has its number in the output, or None if it is of the input."""

    async def read(part: Part, *spans: Span) -> list[Piece]:
        return [piece for span in spans async for piece in store.pieces(head, part, *span)]

    found, num_bytes = [], 0
    inputs = [name for name, number in numbers.items() if number is None]
    try:
        found_inputs = await store.items(head.id, [*map(encode, inputs)]) if inputs else []
        spans_of = {name: [span] for name, span in zip(inputs, found_inputs, strict=True) if span}
        for name, number in numbers.items():
            part: Part = "input_items" if number is None else "output"
            if number is None:
                spans = spans_of.get(name, [])
            else:
                spans = _spans_at(b"".join(await read("places", _place_at(head, number))))
            if spans:
                num_more = sum(end - begin for begin, end in spans)
                admit(num_more)
                num_bytes += num_more
                found.append(await read(part, *spans))
    except ResponseGone:
        # It was deleted meanwhile.
        admit(-num_bytes)
        return []
    return found


def _place_at(head: ResponseHead, number: int) -> Span:
    """Returns where the positions of an output item are. Empty: there is no such item."""
    size = PLACES * array(PLACE).itemsize
    end = min(size * (number + 1), head.size_of("places"))
    return size * number, end


def _spans_at(place: bytes) -> list[Span]:
    """Returns the spans of an output item without its log-probabilities, from its positions if there are any."""
    if not place:
        return []
    numbers = array(PLACE)
    numbers.frombytes(place)
    begin, _, _, logprobs_begin, logprobs_end, end = numbers
    return [(begin, logprobs_begin), (logprobs_end, end)]


# ---- of conversations ------------------------------------------------------------------------------------------------


async def _from_conversation(
    store: ResponseStore, stem: str, names: Sequence[str], owner: str, admit: Admit
) -> list[list[Piece]]:
    for _ in range(MAX_LOOKS):
        head = await store.conversations.head(ConversationId(f"conv_{stem}"))
        if head is None or head.owner != owner:
            break
        try:
            return await _items_in(store.conversations, head, names, admit)
        except ResponseGone:
            continue
    return []


async def _items_in(
    conversations: ConversationStore, head: ConversationHead, names: Sequence[str], admit: Admit
) -> list[list[Piece]]:
    spans = [span for span in await conversations.items(head, [*map(encode, names)]) if span]
    num_bytes = sum(end - begin for begin, end in spans)
    admit(num_bytes)
    try:
        return [[piece async for piece in conversations.pieces(head, *span)] for span in spans]
    except ResponseGone:
        admit(-num_bytes)
        raise
