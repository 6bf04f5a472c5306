"""Sends a stored response, whole or as events. It is read in pieces while it is sent, and never decoded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from itertools import groupby, pairwise
from typing import cast

from fastapi.responses import Response

from alignedserve.gateway.http.errors import AnswerBrokenOff, ApiError, unavailable
from alignedserve.gateway.http.json_pieces import BLOCK_BYTES, AnswerStream, Piece, blocks_of, event_named
from alignedserve.gateway.openai.responses.kept import KeptResponses, not_found
from alignedserve.gateway.openai.responses.replay import written
from alignedserve.gateway.openai.responses.written import AnyPiece, StoredSpan
from alignedserve.store import ResponseGone, ResponseHead, StoreAway
from alignedserve.store.responses import ItemPage

log = logging.getLogger(__name__)

Block = bytes | memoryview
# Yields the bytes between two places. Raises ResponseGone.
Pieces = Callable[[int, int], AsyncIterator[bytes]]
# seconds between two reads of a background response while a stream waits for it
LOOK_S = 0.5


async def response_of(
    head: ResponseHead, kept: KeptResponses, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns OpenAI's object. Raises ApiError."""
    try:
        return await in_pieces(kept.response(head), kept.num_bytes(head), headers)
    except ResponseGone:
        raise not_found(head.id) from None


async def page_of(page: ItemPage, pieces: Pieces) -> Response:
    """Returns OpenAI's list of these items, which `pieces` reads. Raises ResponseGone."""
    return await in_pieces(_listed(page, pieces), _page_bytes(page))


def stream_of(
    head: ResponseHead, kept: KeptResponses, after: int = -1, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns the events with numbers above `after`, once the response has ended."""
    headers = {"Cache-Control": "no-cache", **(headers or {})}
    return AnswerStream(_events(head, kept, after), media_type="text/event-stream", headers=headers)


async def in_pieces(
    pieces: AsyncIterator[bytes], num_bytes: int, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns a JSON answer of `num_bytes`, which is read while it is sent, unless it is small. Raises ResponseGone."""
    kind = "application/json"
    if num_bytes > BLOCK_BYTES:
        headers = {**(headers or {}), "Content-Length": str(num_bytes)}
        return AnswerStream(_unbroken(pieces), media_type=kind, headers=headers)
    return Response(b"".join([piece async for piece in pieces]), media_type=kind, headers=headers)


async def _unbroken(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Raises AnswerBrokenOff if the rest can't be read, since the length was announced."""
    try:
        async for piece in pieces:
            if piece:
                yield piece
    except (StoreAway, ResponseGone) as error:
        raise _broken_off(error) from None


async def _listed(page: ItemPage, pieces: Pieces) -> AsyncIterator[bytes]:
    before, after = _around(page)
    yield before
    begin, end = min(page.spans, default=(0, 0))[0], max(page.spans, default=(0, 0))[1]
    if all(last + 1 == first for (_, last), (first, _) in pairwise(page.spans)):
        # Includes the commas between them.
        async for piece in pieces(begin, end):
            yield piece
    elif end - begin <= BLOCK_BYTES:
        found = b"".join([piece async for piece in pieces(begin, end)])
        yield b",".join(found[first - begin : last - begin] for first, last in page.spans)
    else:
        for number, (first, last) in enumerate(page.spans):
            yield b"," * (number > 0)
            async for piece in pieces(first, last):
                yield piece
    yield after


def _page_bytes(page: ItemPage) -> int:
    sizes = [end - begin for begin, end in page.spans]
    return sum(map(len, _around(page))) + sum(sizes) + max(0, len(sizes) - 1)


def _around(page: ItemPage) -> tuple[bytes, bytes]:
    """Returns the JSON before and after the items of a page."""
    return around(page.first_id, page.last_id, page.has_more)


def around(first_id: bytes | None, last_id: bytes | None, has_more: bool) -> tuple[bytes, bytes]:
    """Returns the JSON before and after the items of a list. The ids are JSON."""
    ends = [b"null" if each is None else each for each in (first_id, last_id)]
    more = b"true" if has_more else b"false"
    return b'{"object":"list","data":[', b'],"first_id":%b,"last_id":%b,"has_more":%b}' % (*ends, more)


async def _events(head: ResponseHead, kept: KeptResponses, after: int) -> AsyncIterator[Block]:
    """Yields the events of a response once it has ended. Raises AnswerBrokenOff if an event can't be read whole."""
    is_within = False
    try:
        while not head.is_over:
            # A comment line, so that neither side considers the connection dead.
            yield b": waiting\n\n"
            await asyncio.sleep(LOOK_S)
            # Continues to wait while the store is away.
            with contextlib.suppress(StoreAway):
                head = await kept.find(head.id, head.owner)
        async for event in written(head, partial(kept.read, head), after):
            async for block in _read_in(event, head, kept):
                is_within = True
                yield block
            is_within = False
    except (ResponseGone, ApiError, StoreAway) as error:
        if is_within:
            raise _broken_off(error) from None
        yield _failure(_reason(error, head))


async def _read_in(
    pieces: Iterable[AnyPiece], head: ResponseHead, kept: KeptResponses
) -> AsyncIterator[Block]:
    """Yields the pieces, and reads those that are stored."""
    for is_stored, some in groupby(pieces, lambda piece: isinstance(piece, StoredSpan)):
        if not is_stored:
            for block in await blocks_of(cast(Iterable[Piece], some)):
                if block:
                    yield block
            continue
        for stored in cast(Iterable[StoredSpan], some):
            async for block in kept.pieces(head, stored.part, stored.begin, stored.end):
                yield block


def _reason(error: ResponseGone | ApiError | StoreAway, head: ResponseHead) -> ApiError:
    match error:
        case ApiError():
            return error
        case ResponseGone():
            return not_found(head.id)
    log.warning("a response can't be read: %s", error)
    return unavailable("the store can't be reached now")


def _broken_off(error: Exception) -> AnswerBrokenOff:
    return AnswerBrokenOff(f"a response can't be read: {error}")


def _failure(error: ApiError) -> bytes:
    """Returns the event that ends the stream of a response that can't be read."""
    fields = {"code": error.code or "server_error", "message": error.message, "param": error.param}
    return event_named("error", {"type": "error", "sequence_number": 0, **fields})
