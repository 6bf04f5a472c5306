"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec.structs import replace

from alignedserve.gateway.anthropic.bodies import CountTokensBody, MessagesBody
from alignedserve.gateway.anthropic.message import MessageSpec
from alignedserve.gateway.generation.call import Call
from alignedserve.gateway.generation.chat import chat_call, count_prompt
from alignedserve.gateway.generation.endpoint import DirectAnswer, Endpoint
from alignedserve.gateway.generation.responding import (
    ANSWERED,
    RequestBuilder,
    answer_directly,
    read_call,
    respond,
)
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.errors import ANTHROPIC_PATH
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel


def message(body: MessagesBody, model: ServedModel, limits: CallLimits) -> Call[MessageSpec]:
    """Returns the call of a message. Raises ApiError and InvalidRequest."""
    with body.naming():
        spec = MessageSpec(eagerness=body.eagerness)
        call = chat_call(body, body.conversation(), model, limits, spec)
        return replace(call, service_tier=body.tier, ignored=[*call.ignored, *body.ignored])


def count_tokens(body: CountTokensBody, model: ServedModel, limits: CallLimits) -> DirectAnswer:
    """Returns the number of tokens of a prompt, which need not fit: clients ask to see how much they have to leave out.
    Raises ApiError and InvalidRequest."""
    with body.naming():
        num_tokens, ignored = count_prompt(body, body.conversation(), model)
        found = msgspec.json.encode({"input_tokens": num_tokens})
        return DirectAnswer(memoryview(found), ignored=[*ignored, *body.ignored])


MESSAGES = Endpoint(ANTHROPIC_PATH, MessagesBody, message, Call[MessageSpec])
COUNT_TOKENS = Endpoint(f"{ANTHROPIC_PATH}/count_tokens", CountTokensBody, count_tokens)


# With this beta, all tools are streamed eagerly unless their `eager_input_streaming` is false.
EAGER_STREAMING = "fine-grained-tool-streaming-2025-05-14"


def _betas(http: Request) -> set[str]:
    return {name.strip() for header in http.headers.getlist("anthropic-beta") for name in header.split(",")}


def message_routes(request_builder: RequestBuilder) -> APIRouter:
    routes = APIRouter()

    @routes.post(MESSAGES.path, responses=ANSWERED, openapi_extra=request_body(MessagesBody))
    async def messages(http: Request) -> Response:
        call = await read_call(http, MESSAGES, request_builder)
        spec = replace(call.spec, is_eager=EAGER_STREAMING in _betas(http))
        return await respond(http, replace(call, spec=spec), request_builder)

    @routes.post(COUNT_TOKENS.path, openapi_extra=request_body(CountTokensBody))
    async def counted(http: Request) -> Response:
        return await answer_directly(http, COUNT_TOKENS, request_builder)

    return routes
