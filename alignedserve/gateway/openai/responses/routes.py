"""/v1/responses, as in OpenAI's API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Annotated, Literal, cast

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse

from alignedserve.gateway.generation.endpoint import ConversationNeeded, Endpoint, Result
from alignedserve.gateway.generation.prepared import Answered
from alignedserve.gateway.generation.preparer import Preparer
from alignedserve.gateway.generation.request_builder import RequestBuilder
from alignedserve.gateway.generation.responding import ANSWERED, respond
from alignedserve.gateway.http.auth_limits import share_of
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.errors import ApiError, BrokenOff, unavailable
from alignedserve.gateway.http.json_body import json_body
from alignedserve.gateway.http.json_pieces import BLOCK_BYTES, Json, Piece, blocks_of, event_named
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.http.reading import Share
from alignedserve.gateway.openai.responses.background import BackgroundResponses
from alignedserve.gateway.openai.responses.body import ResponseBody
from alignedserve.gateway.openai.responses.kept import Conversation, KeptResponses, not_found
from alignedserve.gateway.openai.responses.prepare import PreparedResponse, input_tokens, response
from alignedserve.gateway.openai.responses.replay import written
from alignedserve.gateway.openai.responses.written import AnyPiece, Stored
from alignedserve.store import (
    ResponseGone,
    ResponseHead,
    ResponseStore,
    StoreAway,
    StoreFull,
    TooManyJobs,
)
from alignedserve.store.responses import ItemPage
from alignedserve.store.retry import retried

log = logging.getLogger(__name__)

RESPONSES = Endpoint(
    "/v1/responses", ResponseBody, response, PreparedResponse, in_batches=True, has_conversations=True
)
Block = bytes | memoryview
INPUT_TOKENS = Endpoint("/v1/responses/input_tokens", ResponseBody, input_tokens, has_conversations=True)
# The seconds between two looks at a response in the background, while a stream waits for it.
LOOK_S = 0.5


def response_routes(
    request_builder: RequestBuilder,
    store: ResponseStore | None = None,
    background: BackgroundResponses | None = None,
) -> APIRouter:
    """Without a store, responses are answered and not kept."""
    routes, kept = APIRouter(), KeptResponses(store, request_builder.limits.max_body_bytes)

    @routes.post(RESPONSES.path, responses=ANSWERED, openapi_extra=request_body(ResponseBody))
    async def create(http: Request) -> Response:
        owner, body = owner_of(http), await json_body(http)
        preparer = request_builder.preparer
        call, before = await _result(RESPONSES, body, owner, share_of(http), kept, preparer)
        assert isinstance(call, PreparedResponse)
        if not call.is_background:
            return await respond(http, call, request_builder, partial(kept.keep, call, owner, before))
        if background is None:
            raise ApiError(400, "background: this server keeps no responses", param="background")
        headers = request_builder.ignored_parameters.note(call.ignored)
        try:
            head = await background.begin(call, body, owner, before)
        except TooManyJobs as error:
            raise ApiError(429, str(error), code="too_many_responses") from None
        except StoreFull as error:
            raise ApiError(413, str(error), code="storage_full") from None
        if call.is_stream:
            return _streamed(_events(head, kept, -1), headers)
        return await _response(head, kept, headers)

    @routes.post(INPUT_TOKENS.path, openapi_extra=request_body(ResponseBody))
    async def count_input_tokens(http: Request) -> Response:
        owner, body = owner_of(http), await json_body(http)
        preparer = request_builder.preparer
        found, _ = await _result(INPUT_TOKENS, body, owner, share_of(http), kept, preparer)
        assert isinstance(found, Answered)
        headers = request_builder.ignored_parameters.note(found.ignored)
        return Response(found.body, media_type="application/json", headers=headers)

    @routes.get("/v1/responses/{response_id}", responses=ANSWERED)
    async def retrieve(
        response_id: str,
        http: Request,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1)] = -1,
    ) -> Response:
        head = await kept.find(response_id, owner_of(http))
        if stream:
            return _streamed(_events(head, kept, starting_after))
        return await _response(head, kept)

    @routes.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, http: Request) -> Json:
        head = await kept.find(response_id, owner_of(http))
        if not head.is_over and background:
            head = await background.cancel(head)
        if store:
            await store.delete(head)
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str, http: Request) -> Response:
        head = await kept.find(response_id, owner_of(http))
        if not head.is_background:
            raise ApiError(400, "Only a response in the background can be cancelled.", param="response_id")
        if background:
            head = await background.cancel(head)
        return await _response(head, kept)

    @routes.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        response_id: str,
        http: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        head = await kept.find(response_id, owner_of(http))
        try:
            page = await kept.item_page(head, after, limit, order)
        except ResponseGone:
            raise not_found(response_id) from None
        if page is None:
            raise ApiError(400, f"after={after!r}: there is no such item", param="after")
        return await _in_pieces(_listed(head, page, kept), _page_bytes(page), response_id)

    return routes


async def _result(
    endpoint: Endpoint,
    body: Sequence[bytes],
    owner: str,
    share: Share,
    kept: KeptResponses,
    preparer: Preparer,
) -> tuple[Result, Conversation]:
    """Returns what the endpoint makes of a body, and the conversation before it without its items, which are in that.
    Raises ApiError."""
    before = Conversation()
    try:
        found = await preparer.result(endpoint, body, owner)
    except ConversationNeeded as needed:
        before = await kept.conversation(needed.response_id, owner, share, sum(map(len, body)))
        found = await preparer.result(endpoint, body, owner, before.items)
        share.add(-before.num_bytes)
        before = replace(before, items=None)
    return found, before


async def _response(
    head: ResponseHead, kept: KeptResponses, headers: Mapping[str, str] | None = None
) -> Response:
    return await _in_pieces(kept.response(head), kept.num_bytes(head), head.id, headers)


async def _in_pieces(
    pieces: AsyncIterator[bytes], num_bytes: int, response_id: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns an answer of JSON that has `num_bytes` and is read while it is sent, unless it is small. Raises
    ApiError."""
    kind = "application/json"
    if num_bytes > BLOCK_BYTES:
        headers = {**(headers or {}), "Content-Length": str(num_bytes)}
        return StreamingResponse(_unbroken(pieces), media_type=kind, headers=headers)
    try:
        return Response(b"".join([piece async for piece in pieces]), media_type=kind, headers=headers)
    except ResponseGone:
        raise not_found(response_id) from None


async def _unbroken(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Raises BrokenOff when the rest can't be had: the length was announced."""
    try:
        async for piece in pieces:
            if piece:
                yield piece
    except (StoreAway, ResponseGone) as error:
        raise _broken_off(error) from None


async def _listed(head: ResponseHead, page: ItemPage, kept: KeptResponses) -> AsyncIterator[bytes]:
    before, after = _around(page)
    yield before
    begin, end = min(page.spans, default=(0, 0))[0], max(page.spans, default=(0, 0))[1]
    if page.spans == sorted(page.spans):
        # With what is between them, which are commas.
        async for piece in kept.pieces(head, "input_items", begin, end):
            yield piece
    elif end - begin <= BLOCK_BYTES:
        found = await kept.read(head, "input_items", begin, end)
        yield b",".join(found[first - begin : last - begin] for first, last in page.spans)
    else:
        for number, (first, last) in enumerate(page.spans):
            yield b"," * (number > 0)
            async for piece in kept.pieces(head, "input_items", first, last):
                yield piece
    yield after


def _page_bytes(page: ItemPage) -> int:
    sizes = [end - begin for begin, end in page.spans]
    return sum(map(len, _around(page))) + sum(sizes) + max(0, len(sizes) - 1)


def _around(page: ItemPage) -> tuple[bytes, bytes]:
    """Returns what is before and after the items of a page."""
    ends = [b"null" if each is None else each for each in (page.first_id, page.last_id)]
    has_more = b"true" if page.has_more else b"false"
    return b'{"object":"list","data":[', b'],"first_id":%b,"last_id":%b,"has_more":%b}' % (*ends, has_more)


def _streamed(events: AsyncIterator[Block], headers: Mapping[str, str] | None = None) -> Response:
    headers = {"Cache-Control": "no-cache", **(headers or {})}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _events(head: ResponseHead, kept: KeptResponses, after: int) -> AsyncIterator[Block]:
    """Yields the events of a response when it is over. Raises BrokenOff when the rest of an event can't be had."""
    is_within = False
    try:
        while not head.is_over:
            # A line that clients skip, so that neither side takes the other for dead.
            yield b": waiting\n\n"
            await asyncio.sleep(LOOK_S)
            head = await retried(kept.find, head.id, head.owner)
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
    """Yields the pieces, those that are stored too."""
    for is_stored, some in groupby(pieces, lambda piece: isinstance(piece, Stored)):
        if not is_stored:
            for block in await blocks_of(cast(Iterable[Piece], some)):
                if block:
                    yield block
            continue
        for stored in cast(Iterable[Stored], some):
            async for block in kept.pieces(head, stored.part, stored.begin, stored.end):
                yield block


def _reason(error: ResponseGone | ApiError | StoreAway, head: ResponseHead) -> ApiError:
    match error:
        case ApiError():
            return error
        case ResponseGone():
            return not_found(head.id)
    log.warning("a kept response can't be read: %s", error)
    return unavailable("the store can't be reached now")


def _broken_off(error: Exception) -> BrokenOff:
    return BrokenOff(f"a kept response can't be read: {error}")


def _failure(error: ApiError) -> bytes:
    """Returns the event that ends a stream whose response can't be had."""
    fields = {"code": error.code or "server_error", "message": error.message, "param": error.param}
    return event_named("error", {"type": "error", "sequence_number": 0, **fields})
