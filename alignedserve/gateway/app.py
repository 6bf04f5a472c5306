"""HTTP: what is asked for where, and how an answer gets out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

import alignedserve
from alignedserve.gateway.answers import Answer, ChatAnswer, CompletionAnswer, Json
from alignedserve.gateway.bodies import ChatBody, CompletionBody
from alignedserve.gateway.errors import ApiError, add_error_handlers
from alignedserve.gateway.generation import Delta, Generation
from alignedserve.gateway.health import cluster_body, health
from alignedserve.gateway.islands import Islands
from alignedserve.gateway.model import ServedModel
from alignedserve.sampling_params import SamplingParams

Result = TypeVar("Result")


def create_app(model: ServedModel, islands: Islands, *routers: APIRouter) -> FastAPI:
    """`routers`: what else is answered."""
    app = FastAPI(title="AlignedServe", version=alignedserve.__version__)
    add_error_handlers(app)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, http: Request) -> Response:
        model.check_name(body.model)
        prompts = [model.prompt_ids(prompt) for prompt in body.prompts]
        answer = CompletionAnswer(model, int(time.time()), body.logprobs is not None)
        generation = _generation(islands, model, prompts, body.sampling_params())
        return await _respond(http, generation, answer, bool(body.stream), body.includes_usage)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, http: Request) -> Response:
        model.check_name(body.model)
        prompts = [model.chat_ids(body.messages, body.chat_template_kwargs or {})]
        answer = ChatAnswer(model, int(time.time()), bool(body.logprobs))
        generation = _generation(islands, model, prompts, body.sampling_params())
        return await _respond(http, generation, answer, bool(body.stream), body.includes_usage)

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [_model_body(model)]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Json:
        model.check_name(name)
        return _model_body(model)

    @app.get("/health")
    async def health_route() -> Response:
        status, body = await health(islands)
        return JSONResponse(body, status)

    @app.get("/v1/cluster")
    async def cluster() -> Json:
        return cluster_body(await islands.cluster())

    for router in routers:
        app.include_router(router)
    return app


def _generation(
    islands: Islands, model: ServedModel, prompts: list[list[int]], params: SamplingParams
) -> Generation:
    for prompt in prompts:
        model.check(prompt, params)
    return Generation(islands, model, prompts, params)


async def _respond(
    http: Request, generation: Generation, answer: Answer, is_stream: bool, includes_usage: bool
) -> Response:
    generation.start()
    deltas = generation.deltas()
    try:
        if is_stream:
            # the status goes out before the body: what is refused is refused now
            first = await _unless_gone(http, anext(deltas))
            events = _events(first, deltas, generation, answer, includes_usage)
            return _EventStream(events, generation.close)
        found = await _unless_gone(http, _all(deltas))
        return JSONResponse(answer.whole(found, generation.usage))
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
        for chunk in answer.chunks(first):
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
