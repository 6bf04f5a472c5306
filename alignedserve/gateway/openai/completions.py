"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from alignedserve.gateway.generation.endpoint import Endpoint
from alignedserve.gateway.generation.request_builder import RequestBuilder
from alignedserve.gateway.generation.responding import ANSWERED, read_call, respond
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.openai.bodies import ChatBody, CompletionBody
from alignedserve.gateway.openai.prepare import chat, completion
from alignedserve.gateway.openai.prepared import PreparedChatCompletion, PreparedCompletion

COMPLETIONS = Endpoint("/v1/completions", CompletionBody, completion, PreparedCompletion, in_batches=True)
CHAT = Endpoint("/v1/chat/completions", ChatBody, chat, PreparedChatCompletion, in_batches=True)


def completion_routes(request_builder: RequestBuilder) -> APIRouter:
    routes = APIRouter()

    @routes.post(COMPLETIONS.path, responses=ANSWERED, openapi_extra=request_body(CompletionBody))
    async def completions(http: Request) -> Response:
        call = await read_call(http, COMPLETIONS, request_builder)
        return await respond(http, call, request_builder)

    @routes.post(CHAT.path, responses=ANSWERED, openapi_extra=request_body(ChatBody))
    async def chat_completions(http: Request) -> Response:
        call = await read_call(http, CHAT, request_builder)
        return await respond(http, call, request_builder)

    return routes
