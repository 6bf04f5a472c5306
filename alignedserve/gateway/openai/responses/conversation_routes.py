"""`/v1/conversations`, as in OpenAI's API."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from alignedserve.gateway.generation.endpoint import Endpoint
from alignedserve.gateway.generation.responding import RequestBuilder
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Json, encode, json_response
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.http.reading import json_body
from alignedserve.gateway.openai.responses.conversation_bodies import ADD_ITEMS, CREATE, UPDATE, Given
from alignedserve.gateway.openai.responses.conversations import KeptConversations
from alignedserve.gateway.openai.responses.items import stem_in
from alignedserve.gateway.openai.responses.sending import around, in_pieces, page_of
from alignedserve.store import ConversationHead, NewItems
from alignedserve.store.responses import ItemPage

ONE = "/v1/conversations/{conversation_id}"
# Further contents of items. Accepted without effect: items here never have any.
Include = Annotated[list[str] | None, Query()]


def add_conversation_routes(
    routes: APIRouter, kept: KeptConversations, request_builder: RequestBuilder
) -> None:
    async def read(http: Request, endpoint: Endpoint) -> tuple[Given, dict[str, str]]:
        """Returns the parts of the body that are stored, and headers. Raises ApiError."""
        found = await request_builder.preparer.answer(endpoint, await json_body(http), owner_of(http))
        assert isinstance(found, Given)
        return found, dict(request_builder.ignored_parameters.note(found.ignored))

    @routes.post(CREATE.path, openapi_extra=request_body(CREATE.body))
    async def create(http: Request) -> Response:
        given, headers = await read(http, CREATE)
        return _json((await kept.add(given, owner_of(http))).state, headers)

    @routes.get(ONE)
    async def retrieve(conversation_id: str, http: Request) -> Response:
        return _json((await kept.find(conversation_id, owner_of(http))).state)

    @routes.post(ONE, openapi_extra=request_body(UPDATE.body))
    async def update(conversation_id: str, http: Request) -> Response:
        given, headers = await read(http, UPDATE)
        head = await kept.find(conversation_id, owner_of(http))
        return _json((await kept.put_metadata(head, given.metadata)).state, headers)

    @routes.delete(ONE)
    async def delete(conversation_id: str, http: Request) -> Json:
        await kept.store.delete(await kept.find(conversation_id, owner_of(http)))
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    @routes.post(ADD_ITEMS.path, openapi_extra=request_body(ADD_ITEMS.body))
    async def add_items(conversation_id: str, http: Request, include: Include = None) -> Response:
        given, headers = await read(http, ADD_ITEMS)
        head = await kept.find(conversation_id, owner_of(http))
        given = given.with_stem(stem_in(head.id) or given.stem)
        await kept.append(head, [NewItems([given.items], given.index)])
        names = [line.partition(b" ")[2] for line in given.index.splitlines()]
        first_id, last_id = (names[0], names[-1]) if names else (None, None)
        before, after = around(first_id, last_id, has_more=False)
        return await json_response([before, given.items, after], headers)

    _add_stored_items(routes, kept)


def _add_stored_items(routes: APIRouter, kept: KeptConversations) -> None:
    @routes.get(f"{ONE}/items")
    async def list_items(
        conversation_id: str,
        http: Request,
        include: Include = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        async def listed(head: ConversationHead) -> Response:
            name = None if after is None else _name(after)
            page: ItemPage | None = None
            if after is None or name is not None:
                page = await kept.store.item_page(head, name, limit, order)
            if page is None:
                raise ApiError(400, f"after={after!r}: there is no such item", param="after")
            return await page_of(page, partial(kept.store.pieces, head))

        return await kept.looked_at(conversation_id, owner_of(http), listed)

    @routes.get(f"{ONE}/items/{{item_id}}")
    async def retrieve_item(
        conversation_id: str, item_id: str, http: Request, include: Include = None
    ) -> Response:
        async def shown(head: ConversationHead) -> Response:
            begin, end = await _span(kept, head, item_id)
            return await in_pieces(kept.store.pieces(head, begin, end), end - begin)

        return await kept.looked_at(conversation_id, owner_of(http), shown)

    @routes.delete(f"{ONE}/items/{{item_id}}")
    async def delete_item(conversation_id: str, item_id: str, http: Request) -> Response:
        async def deleted(head: ConversationHead) -> Response:
            await _span(kept, head, item_id)
            await kept.store.delete_item(head, encode(item_id))
            return _json(head.state)

        return await kept.looked_at(conversation_id, owner_of(http), deleted)


async def _span(kept: KeptConversations, head: ConversationHead, item_id: str) -> tuple[int, int]:
    """Returns where the item is. Raises ApiError and ResponseGone."""
    name = _name(item_id)
    [span] = [None] if name is None else await kept.store.items(head, [name])
    if span is None:
        raise ApiError(404, f"Item with id {item_id!r} not found.", param="item_id")
    return span


def _name(item_id: str) -> bytes | None:
    """Returns the id as JSON. None: no item can have it."""
    try:
        return encode(item_id)
    except UnicodeEncodeError:
        return None


def _json(state: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(state, media_type="application/json", headers=headers)
