"""HTTP: what is asked for where, and how an answer gets out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

import alignedserve
from alignedserve.gateway.http.callers import ANY_CALLER, Callers
from alignedserve.gateway.http.description import describe, request_body
from alignedserve.gateway.http.doors import Doors
from alignedserve.gateway.http.errors import ApiError, add_error_handlers
from alignedserve.gateway.http.gate import Gate
from alignedserve.gateway.http.json_body import json_body
from alignedserve.gateway.http.json_pieces import blocks_of, encode, json_response
from alignedserve.gateway.http.keys import Keys, owner_of
from alignedserve.gateway.model import ServedModel
from alignedserve.gateway.openai.answers import Answer, Json
from alignedserve.gateway.openai.bodies import ChatBody, CompletionBody
from alignedserve.gateway.openai.generation import Delta, Generation
from alignedserve.gateway.openai.intake import CHAT, COMPLETIONS, Intake
from alignedserve.gateway.openai.service import Slo, service_of
from alignedserve.gateway.openai.token_bodies import DetokenizeBody, TokenizeBody
from alignedserve.gateway.openai.tokens import tokens_router
from alignedserve.gateway.page.routes import add_page
from alignedserve.gateway.telemetry.health import cluster_body, health
from alignedserve.store import Store

Result = TypeVar("Result")

# read by the endpoints themselves
BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
# whole, or as a stream
ANSWERED: dict[int | str, Any] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}


def create_app(
    intake: Intake,
    doors: Doors | None = None,
    keys: Keys | None = None,
    routers: Sequence[APIRouter] = (),
    allowed_origins: Sequence[str] = (),
    store: Store | None = None,
    callers: Callers = ANY_CALLER,
) -> FastAPI:
    """`routers`: what else is answered. `store`: of files and batches, where there are any."""
    model, islands, limits = intake.model, intake.islands, intake.limits
    doors, keys = doors or Doors(), keys or Keys()
    # its pages of the description would load scripts from elsewhere
    app = FastAPI(
        title="AlignedServe",
        version=alignedserve.__version__,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    add_error_handlers(app)

    @app.get("/health", responses={503: {"description": "It can't answer, and why"}})
    async def health_route() -> Response:
        status, body = await health(islands.cluster, doors, store)
        return JSONResponse(body, status)

    public = {health_route, *add_page(app)}
    app.add_middleware(
        Gate, router=app.router, public=public, keys=keys, limits=limits, doors=doors, callers=callers
    )
    if allowed_origins:
        # around the gate: what a browser asks beforehand comes without a key, and it must be able to read a refusal
        app.add_middleware(
            CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )

    app.include_router(tokens_router(intake.preparer))

    @app.post(COMPLETIONS, responses=ANSWERED, openapi_extra=request_body(CompletionBody))
    async def completions(http: Request) -> Response:
        return await generated(COMPLETIONS, http)

    @app.post(CHAT, responses=ANSWERED, openapi_extra=request_body(ChatBody))
    async def chat_completions(http: Request) -> Response:
        return await generated(CHAT, http)

    async def generated(endpoint: str, http: Request) -> Response:
        owner = owner_of(http)
        call = await intake.preparer.call(endpoint, await json_body(http), owner)
        slo = Slo(ttft_ms=call.ttft_ms, tbt_ms=call.tbt_ms)
        service = service_of(call.service_tier, slo, http.headers, intake.slo)
        generation, answer = await intake.take(call, service, owner)
        return await _respond(http, generation, answer, call.is_stream, call.includes_usage)

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [_model_body(model)]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Json:
        model.check_name(name)
        return _model_body(model)

    @app.get("/v1/cluster")
    async def cluster() -> Json:
        return cluster_body(await islands.cluster())

    for router in routers:
        app.include_router(router)
    app.openapi = describe(app, BODIES)  # type: ignore[method-assign]
    return app


async def _respond(
    http: Request, generation: Generation, answer: Answer, is_stream: bool, includes_usage: bool
) -> Response:
    try:
        if is_stream:
            # the status goes out before the body: what is refused is refused now
            deltas = generation.deltas()
            first = await _unless_gone(http, _first(generation, deltas))
            events = _events(first, deltas, generation, answer, includes_usage)
            return _EventStream(events, generation.close)
        await _unless_gone(http, generation.collect(answer.add))
        return await json_response(answer.whole(generation.usage))
    except BaseException:
        generation.close()
        raise


async def _first(generation: Generation, deltas: AsyncIterator[Delta]) -> Delta:
    await generation.start()
    return await anext(deltas)


async def _events(
    first: Delta, rest: AsyncIterator[Delta], generation: Generation, answer: Answer, includes_usage: bool
) -> AsyncIterator[bytes | memoryview]:
    usage: Json = {"usage": None} if includes_usage else {}
    try:
        async for delta in _with_first(first, rest):
            if opening := answer.opening(delta, usage):
                for block in await blocks_of(chain([b"data: "], opening, [b"\n\n"])):
                    yield block
            if chunk := answer.chunk(delta, usage):
                yield _event(chunk)
        if includes_usage:
            yield _event(answer.usage_chunk(generation.usage))
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
            # the client may have gone in the middle of it
            self._close()


async def _unless_gone(http: Request, work: Awaitable[Result]) -> Result:
    """`work`'s result, unless the client hangs up first."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            # nobody reads this; 499 is what proxies call it in their logs
            raise ApiError(499, "the client has hung up")
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _model_body(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "alignedserve",
        "max_model_len": model.max_model_len,
    }
