"""`/v1/responses`, as in OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from alignedserve.gateway.generation.call import Call
from alignedserve.gateway.generation.endpoint import (
    DirectAnswer,
    Endpoint,
    Needed,
    Result,
)
from alignedserve.gateway.generation.preparer import Preparer
from alignedserve.gateway.generation.responding import ANSWERED, RequestBuilder, respond, unless_gone
from alignedserve.gateway.http.access import share_of
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Json
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.http.reading import Share, json_body
from alignedserve.gateway.openai.responses.background import BackgroundResponses
from alignedserve.gateway.openai.responses.body import ResponseBody
from alignedserve.gateway.openai.responses.builder import ResponseSpec
from alignedserve.gateway.openai.responses.compaction import CompactBody, CompactionSpec, compaction
from alignedserve.gateway.openai.responses.conversation_routes import add_conversation_routes
from alignedserve.gateway.openai.responses.kept import EarlierConversation, KeptResponses, not_found
from alignedserve.gateway.openai.responses.prepare import input_tokens, response
from alignedserve.gateway.openai.responses.sending import page_of, response_of, stream_of
from alignedserve.store import ResponseGone, ResponseStore, StoreFull, TooManyJobs

RESPONSES = Endpoint(
    "/v1/responses", ResponseBody, response, Call[ResponseSpec], in_batches=True, has_conversations=True
)
INPUT_TOKENS = Endpoint("/v1/responses/input_tokens", ResponseBody, input_tokens, has_conversations=True)
COMPACT = Endpoint(
    "/v1/responses/compact", CompactBody, compaction, Call[CompactionSpec], has_conversations=True
)
# Larger bodies are not decoded here to look up the response before them. If there is one, such a call takes two turns
# in the child process for bodies.
MAX_LOOKED_AT_BYTES = 8 << 10


def response_routes(
    request_builder: RequestBuilder,
    store: ResponseStore | None = None,
    background: BackgroundResponses | None = None,
) -> APIRouter:
    """Without a store, responses are answered and not stored."""
    routes, kept = APIRouter(), KeptResponses(store, request_builder.limits.max_body_bytes)
    add_conversation_routes(routes, kept.conversations, request_builder)
    _add_calls(routes, kept, request_builder, background)
    _add_stored(routes, kept, store, background)
    return routes


def _add_calls(
    routes: APIRouter,
    kept: KeptResponses,
    request_builder: RequestBuilder,
    background: BackgroundResponses | None,
) -> None:
    preparer, ignored_parameters = request_builder.preparer, request_builder.ignored_parameters

    @routes.post(RESPONSES.path, responses=ANSWERED, openapi_extra=request_body(ResponseBody))
    async def create(http: Request) -> Response:
        owner, body = owner_of(http), await json_body(http)
        preparing = _result(RESPONSES, body, owner, share_of(http), kept, preparer)
        call, before = await unless_gone(http, preparing)
        assert isinstance(call, Call)
        if not call.spec.is_background:
            return await respond(http, call, request_builder, partial(kept.keep, call.spec, owner, before))
        if background is None:
            raise ApiError(400, "background: this server stores no responses", param="background")
        headers = ignored_parameters.note(call.ignored)
        try:
            head = await background.begin(call, body, owner, before)
        except TooManyJobs as error:
            raise ApiError(429, str(error), code="too_many_responses") from None
        except StoreFull as error:
            raise ApiError(413, str(error), code="storage_full") from None
        if call.is_stream:
            return stream_of(head, kept, headers=headers)
        return await response_of(head, kept, headers)

    @routes.post(COMPACT.path, openapi_extra=request_body(CompactBody))
    async def compact(http: Request) -> Response:
        owner, body = owner_of(http), await json_body(http)
        preparing = _result(COMPACT, body, owner, share_of(http), kept, preparer)
        call, _ = await unless_gone(http, preparing)
        assert isinstance(call, Call)
        return await respond(http, call, request_builder)

    @routes.post(INPUT_TOKENS.path, openapi_extra=request_body(ResponseBody))
    async def count_input_tokens(http: Request) -> Response:
        owner, body = owner_of(http), await json_body(http)
        preparing = _result(INPUT_TOKENS, body, owner, share_of(http), kept, preparer)
        found, _ = await unless_gone(http, preparing)
        assert isinstance(found, DirectAnswer)
        headers = ignored_parameters.note(found.ignored)
        return Response(bytes(found.body), media_type="application/json", headers=headers)


def _add_stored(
    routes: APIRouter,
    kept: KeptResponses,
    store: ResponseStore | None,
    background: BackgroundResponses | None,
) -> None:
    @routes.get("/v1/responses/{response_id}", responses=ANSWERED)
    async def retrieve(
        response_id: str,
        http: Request,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1)] = -1,
    ) -> Response:
        head = await kept.find(response_id, owner_of(http))
        if stream:
            return stream_of(head, kept, starting_after)
        return await response_of(head, kept)

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
        return await response_of(head, kept)

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
            if page is None:
                raise ApiError(400, f"after={after!r}: there is no such item", param="after")
            return await page_of(page, partial(kept.pieces, head, "input_items"))
        except ResponseGone:
            raise not_found(response_id) from None


async def _result(
    endpoint: Endpoint,
    body: Sequence[bytes],
    owner: str,
    share: Share,
    kept: KeptResponses,
    preparer: Preparer,
) -> tuple[Result, EarlierConversation]:
    """Returns the result of the endpoint for a body, and the conversation before it without its items, which are in the
    result. Raises ApiError."""
    num_bytes, before = sum(map(len, body)), EarlierConversation()
    if (looked_up := _looked_up(body, num_bytes)) is not None:
        try:
            before = await kept.before(looked_up, owner, share, num_bytes)
        except ApiError as error:
            # Errors of the body, which is not validated yet, take precedence. If it has none, this one comes again.
            if error.status >= 500:
                raise
    found, before = await kept.prepared(preparer, endpoint, body, owner, share, before)
    share.add(-before.num_bytes - before.num_referred_bytes)
    return found, replace(before, items=None, referred=None)


_CHAINING = (b'previous_response_id"', b'conversation"')


class _Named(msgspec.Struct):
    id: str


class _Chained(msgspec.Struct):
    previous_response_id: str | None = None
    conversation: str | _Named | None = None


def _looked_up(body: Sequence[bytes], num_bytes: int) -> Needed | None:
    """Returns what the call continues, so that it takes one turn in the child process. None: nothing, or only that
    process can tell."""
    if num_bytes > MAX_LOOKED_AT_BYTES:
        return None
    whole = b"".join(body)
    if not any(name in whole for name in _CHAINING):
        return None
    try:
        chained = msgspec.json.decode(whole, type=_Chained)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    previous_id, conversation = chained.previous_response_id, chained.conversation
    if conversation is None:
        return None if previous_id is None else Needed("previous_response_id", previous_id)
    # Both together are refused later.
    name = conversation.id if isinstance(conversation, _Named) else conversation
    return None if previous_id is not None else Needed("conversation", name)
