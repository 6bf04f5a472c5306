"""`/v1/completions` and `/v1/chat/completions`: how an answer is sent, complete or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import chain
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_body import json_body
from alignedserve.gateway.http.json_pieces import Json, blocks_of, encode, json_response
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.openai.bodies import ChatBody, CompletionBody
from alignedserve.gateway.openai.generation import Delta, Generation
from alignedserve.gateway.openai.request_builder import CHAT, COMPLETIONS, RequestBuilder
from alignedserve.gateway.openai.response_builder import ResponseBuilder
from alignedserve.gateway.openai.service import Slo, service_of

Result = TypeVar("Result")

# An answer comes whole or as a stream.
ANSWERED: dict[int | str, Any] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}


def completion_routes(request_builder: RequestBuilder) -> APIRouter:
    routes = APIRouter()

    @routes.post(COMPLETIONS, responses=ANSWERED, openapi_extra=request_body(CompletionBody))
    async def completions(http: Request) -> Response:
        return await generated(COMPLETIONS, http)

    @routes.post(CHAT, responses=ANSWERED, openapi_extra=request_body(ChatBody))
    async def chat_completions(http: Request) -> Response:
        return await generated(CHAT, http)

    async def generated(endpoint: str, http: Request) -> Response:
        owner = owner_of(http)
        call = await request_builder.preparer.call(endpoint, await json_body(http), owner)
        slo = Slo(ttft_ms=call.ttft_ms, tbt_ms=call.tbt_ms)
        service = service_of(call.service_tier, slo, http.headers, request_builder.slo)
        generation, builder = await request_builder.build(call, service, owner)
        return await _respond(http, generation, builder, call.is_stream, call.includes_usage)

    return routes


async def _respond(
    http: Request, generation: Generation, builder: ResponseBuilder, is_stream: bool, includes_usage: bool
) -> Response:
    try:
        if is_stream:
            # The status is sent before the body, so every error that can be found now is found now.
            deltas = generation.deltas()
            first = await _unless_gone(http, _first(generation, deltas))
            events = _events(first, deltas, generation, builder, includes_usage)
            return _EventStream(events, generation.close)
        await _unless_gone(http, generation.collect(builder.add))
        return await json_response(builder.whole(generation.usage))
    except BaseException:
        generation.close()
        raise


async def _first(generation: Generation, deltas: AsyncIterator[Delta]) -> Delta:
    await generation.start()
    return await anext(deltas)


async def _events(
    first: Delta,
    rest: AsyncIterator[Delta],
    generation: Generation,
    builder: ResponseBuilder,
    includes_usage: bool,
) -> AsyncIterator[bytes | memoryview]:
    usage: Json = {"usage": None} if includes_usage else {}
    try:
        async for delta in _with_first(first, rest):
            if opening := builder.opening(delta, usage):
                for block in await blocks_of(chain([b"data: "], opening, [b"\n\n"])):
                    yield block
            if chunk := builder.chunk(delta, usage):
                yield _event(chunk)
        if includes_usage:
            yield _event(builder.usage_chunk(generation.usage))
    except ApiError as error:
        yield _event(error.body)
    yield b"data: [DONE]\n\n"


async def _with_first(first: Delta, rest: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
    yield first
    async for delta in rest:
        yield delta


def _event(body: Json) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


class _EventStream(StreamingResponse):
    def __init__(self, events: AsyncIterator[bytes | memoryview], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # The client may have gone in the middle of the stream.
            self._close()


async def _unless_gone(http: Request, work: Awaitable[Result]) -> Result:
    """Returns the result of `work`. Raises ApiError when the client hangs up first."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            # No client reads this error; proxies log it as 499.
            raise ApiError(499, "the client has hung up")
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
