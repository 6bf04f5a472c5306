"""HTTP: what is asked for where, and how an answer gets out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

import alignedserve
from alignedserve.gateway.answers import Answer, Json
from alignedserve.gateway.bodies import ChatBody, CompletionBody
from alignedserve.gateway.description import describe
from alignedserve.gateway.doors import Doors
from alignedserve.gateway.errors import ApiError, add_error_handlers
from alignedserve.gateway.gate import Gate
from alignedserve.gateway.generation import Delta, Generation
from alignedserve.gateway.health import cluster_body, health
from alignedserve.gateway.intake import Intake
from alignedserve.gateway.keys import Keys
from alignedserve.gateway.model import ServedModel
from alignedserve.gateway.page.routes import add_page
from alignedserve.gateway.service import service_of
from alignedserve.gateway.tokens import tokens_router

Result = TypeVar("Result")

# whole, or as a stream
ANSWERED: dict[int | str, Any] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}


def create_app(
    intake: Intake,
    doors: Doors | None = None,
    keys: Keys | None = None,
    routers: Sequence[APIRouter] = (),
    allowed_origins: Sequence[str] = (),
) -> FastAPI:
    """`routers`: what else is answered."""
    model, islands, limits = intake.model, intake.islands, intake.limits
    doors, keys = doors or Doors(), keys or Keys()
    app = FastAPI(title="AlignedServe", version=alignedserve.__version__, redirect_slashes=False)
    add_error_handlers(app)

    @app.get("/health", responses={503: {"description": "It can't answer, and why"}})
    async def health_route() -> Response:
        status, body = await health(islands, doors)
        return JSONResponse(body, status)

    public = {health_route, *add_page(app)}
    app.add_middleware(Gate, router=app.router, public=public, keys=keys, limits=limits, doors=doors)
    if allowed_origins:
        # around the gate: what a browser asks beforehand comes without a key, and it must be able to read a refusal
        app.add_middleware(
            CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )

    app.include_router(tokens_router(model))

    @app.post("/v1/completions", responses=ANSWERED)
    async def completions(body: CompletionBody, http: Request) -> Response:
        service = service_of(body.service_tier, body.slo, http.headers, intake.slo)
        generation, answer = await intake.completion(body, service)
        return await _respond(http, generation, answer, bool(body.stream), body.includes_usage)

    @app.post("/v1/chat/completions", responses=ANSWERED)
    async def chat_completions(body: ChatBody, http: Request) -> Response:
        service = service_of(body.service_tier, body.slo, http.headers, intake.slo)
        generation, answer = await intake.chat(body, service)
        return await _respond(http, generation, answer, bool(body.stream), body.includes_usage)

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
    app.openapi = describe(app)  # type: ignore[method-assign]
    return app


async def _respond(
    http: Request, generation: Generation, answer: Answer, is_stream: bool, includes_usage: bool
) -> Response:
    try:
        generation.start()
        deltas = generation.deltas()
        if is_stream:
            # the status goes out before the body: what is refused is refused now
            first = await _unless_gone(http, anext(deltas))
            events = _events(first, deltas, generation, answer, includes_usage)
            return _EventStream(events, generation.close)
        found = await _unless_gone(http, _all(deltas))
        return await generation.beside(lambda: JSONResponse(answer.whole(found, generation.usage)))
    except BaseException:
        generation.close()
        raise


async def _all(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def _events(
    first: Delta, rest: AsyncIterator[Delta], generation: Generation, answer: Answer, includes_usage: bool
) -> AsyncIterator[bytes]:
    usage: Json = {"usage": None} if includes_usage else {}
    try:
        for chunk in await generation.beside(lambda: answer.chunks(first)):
            yield _event(chunk | usage)
        async for delta in rest:
            for chunk in answer.chunks(delta):
                yield _event(chunk | usage)
        if includes_usage:
            yield _event(answer.usage_chunk(generation.usage))
    except ApiError as error:
        yield _event(error.body)
    yield b"data: [DONE]\n\n"


def _event(body: Json) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class _EventStream(StreamingResponse):
    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
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
