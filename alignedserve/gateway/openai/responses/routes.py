"""/v1/responses, as in OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from alignedserve.gateway.generation.endpoint import Endpoint
from alignedserve.gateway.generation.request_builder import RequestBuilder
from alignedserve.gateway.generation.responding import ANSWERED, respond
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_body import json_body
from alignedserve.gateway.http.json_pieces import Json
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.openai.files import list_response
from alignedserve.gateway.openai.responses.background import BackgroundResponses
from alignedserve.gateway.openai.responses.body import ResponseBody
from alignedserve.gateway.openai.responses.kept import KeptResponses
from alignedserve.gateway.openai.responses.prepare import PreparedResponse, response
from alignedserve.gateway.openai.responses.replay import written
from alignedserve.store import ResponseRecord, ResponseStore, StoreFull, TooManyJobs
from alignedserve.store.retry import retried

RESPONSES = Endpoint("/v1/responses", ResponseBody, response, PreparedResponse, in_batches=True)
# The seconds between two looks at a response in the background, while a stream waits for it.
LOOK_S = 0.5


def response_routes(
    request_builder: RequestBuilder,
    store: ResponseStore | None = None,
    background: BackgroundResponses | None = None,
) -> APIRouter:
    """Without a store, responses are answered and not kept."""
    routes, kept = APIRouter(), KeptResponses(store)

    @routes.post(RESPONSES.path, responses=ANSWERED, openapi_extra=request_body(ResponseBody))
    async def create(http: Request) -> Response:
        owner = owner_of(http)
        pieces = await kept.with_earlier(await json_body(http), owner)
        call = await request_builder.preparer.call(RESPONSES, pieces, owner)
        assert isinstance(call, PreparedResponse)
        if not call.is_background:
            return await respond(http, call, request_builder, partial(kept.keep, call, owner))
        if background is None:
            raise ApiError(400, "background: this server keeps no responses", param="background")
        headers = request_builder.ignored_parameters.note(call.ignored)
        try:
            found = await background.begin(call, b"".join(pieces), owner)
        except TooManyJobs as error:
            raise ApiError(429, str(error), code="too_many_responses") from None
        except StoreFull as error:
            raise ApiError(413, str(error), code="storage_full") from None
        if call.is_stream:
            return _streamed(await kept.find(found["id"], owner), kept, -1, headers)
        return JSONResponse(found, headers=headers)

    @routes.get("/v1/responses/{response_id}", responses=ANSWERED)
    async def retrieve(
        response_id: str,
        http: Request,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1)] = -1,
    ) -> Response:
        record = await kept.find(response_id, owner_of(http))
        if stream:
            return _streamed(record, kept, starting_after)
        return Response(record.body, media_type="application/json")

    @routes.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, http: Request) -> Json:
        record = await kept.find(response_id, owner_of(http))
        if not record.is_over and background:
            record = await background.cancel(record)
        if store:
            await store.delete(record)
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str, http: Request) -> Response:
        record = await kept.find(response_id, owner_of(http))
        if not msgspec.json.decode(record.body).get("background"):
            raise ApiError(400, "Only a response in the background can be cancelled.", param="response_id")
        if background:
            record = await background.cancel(record)
        return Response(record.body, media_type="application/json")

    @routes.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        response_id: str,
        http: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        record = await kept.find(response_id, owner_of(http))
        items = msgspec.json.decode(record.input_items)
        if order == "desc":
            items.reverse()
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise ApiError(400, f"after={after!r}: there is no such item", param="after")
            items = items[ids.index(after) + 1 :]
        return list_response(items[:limit], has_more=len(items) > limit)

    return routes


def _streamed(
    record: ResponseRecord, kept: KeptResponses, after: int, headers: Mapping[str, str] | None = None
) -> Response:
    headers = {"Cache-Control": "no-cache", **(headers or {})}
    return StreamingResponse(_events(record, kept, after), media_type="text/event-stream", headers=headers)


async def _events(record: ResponseRecord, kept: KeptResponses, after: int) -> AsyncIterator[bytes]:
    """Yields the events of a response when it is over."""
    while not record.is_over:
        # A line that clients skip, so that neither side takes the other for dead.
        yield b": waiting\n\n"
        await asyncio.sleep(LOOK_S)
        record = await retried(kept.find, record.id, record.owner)
    for event in written(msgspec.json.decode(record.body), after):
        yield event
