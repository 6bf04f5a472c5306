"""Sends an answer, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from alignedserve.gateway.generation.endpoint import Endpoint
from alignedserve.gateway.generation.generation import ChoiceDelta, Generation, TokenUsage
from alignedserve.gateway.generation.prepared import Prepared
from alignedserve.gateway.generation.request_builder import RequestBuilder
from alignedserve.gateway.generation.response_builder import ResponseBuilder
from alignedserve.gateway.generation.service import Slo, service_of
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import AnswerStream, Piece, blocks_of, json_response
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.http.reading import json_body

Result = TypeVar("Result")


# An answer is JSON or a stream of events.
ANSWERED: dict[int | str, Any] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}

# Called with a complete answer, before its end is sent.
Keep = Callable[[ResponseBuilder, TokenUsage], Awaitable[None]]


async def _keep_nothing(builder: ResponseBuilder, usage: TokenUsage) -> None:
    pass


async def read_call(http: Request, endpoint: Endpoint, request_builder: RequestBuilder) -> Prepared:
    """Reads the body and returns its call. Raises ApiError."""
    return await request_builder.preparer.call(endpoint, await json_body(http), owner_of(http))


async def answer_directly(http: Request, endpoint: Endpoint, request_builder: RequestBuilder) -> Response:
    """Reads the body and sends the answer of an endpoint that needs no engine. Raises ApiError."""
    found = await request_builder.preparer.answer(endpoint, await json_body(http), owner_of(http))
    headers = request_builder.ignored_parameters.note(found.ignored)
    return await json_response([found.body], headers)


async def respond(
    http: Request, call: Prepared, request_builder: RequestBuilder, keep: Keep = _keep_nothing
) -> Response:
    """Runs the call and sends its answer. Raises ApiError and InvalidRequest."""
    owner = owner_of(http)
    slo = Slo(ttft_ms=call.ttft_ms, tbt_ms=call.tbt_ms)
    service = service_of(call.service_tier, slo, http.headers, request_builder.slo)
    headers = request_builder.ignored_parameters.note(call.ignored)
    generation, builder = await request_builder.build(call, service, owner)
    try:
        if call.is_stream:
            # The status is sent before the body, so every error that can be found before the first token is found
            # first.
            deltas = generation.deltas()
            first = await unless_gone(http, _first(generation, deltas))
            events = _events(first, deltas, generation, builder, keep)
            return _EventStream(events, headers, generation.close)
        await unless_gone(http, generation.collect(builder.add))
        await keep(builder, generation.usage)
        return await json_response(builder.whole(generation.usage), headers)
    except BaseException:
        generation.close()
        raise


async def _first(generation: Generation, deltas: AsyncIterator[ChoiceDelta]) -> ChoiceDelta:
    await generation.start()
    return await anext(deltas)


async def _events(
    first: ChoiceDelta,
    rest: AsyncIterator[ChoiceDelta],
    generation: Generation,
    builder: ResponseBuilder,
    keep: Keep,
) -> AsyncIterator[bytes | memoryview]:
    usage = generation.usage
    try:
        async for delta in _with_first(first, rest):
            if delta.progress:
                yield builder.progress(delta, usage)
                continue
            if opening := builder.opening(delta, usage):
                for block in await blocks_of(opening):
                    yield block
            for block in await _blocks(builder.events(delta, usage)):
                yield block
        await keep(builder, usage)
        for block in await blocks_of(builder.end(usage)):
            yield block
    except ApiError as error:
        for block in await _blocks(builder.failure(error)):
            yield block


async def _blocks(events: bytes | Iterable[Piece]) -> Sequence[bytes | memoryview]:
    """Returns the events to send, without empty blocks."""
    blocks = [events] if isinstance(events, bytes) else await blocks_of(events)
    return [block for block in blocks if block]


async def _with_first(first: ChoiceDelta, rest: AsyncIterator[ChoiceDelta]) -> AsyncIterator[ChoiceDelta]:
    yield first
    async for delta in rest:
        yield delta


class _EventStream(AnswerStream):
    def __init__(
        self, events: AsyncIterator[bytes | memoryview], headers: Mapping[str, str], close: Callable[[], None]
    ) -> None:
        headers = {"Cache-Control": "no-cache", **headers}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # The client may have disconnected during the stream.
            self._close()


async def unless_gone(http: Request, work: Awaitable[Result]) -> Result:
    """Returns the result of `work`. Raises ApiError if the client disconnects first."""
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
