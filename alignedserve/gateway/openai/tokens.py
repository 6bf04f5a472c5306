"""`/tokenize` and `/detokenize` over HTTP."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from alignedserve.gateway.generation.endpoint import Endpoint
from alignedserve.gateway.generation.request_builder import RequestBuilder
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.json_pieces import json_response
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.http.reading import json_body
from alignedserve.gateway.openai.token_bodies import (
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
    detokenized,
    tokenized,
)

TOKENIZE = Endpoint("/tokenize", TokenizeBody, tokenized)
DETOKENIZE = Endpoint("/detokenize", DetokenizeBody, detokenized)


def tokens_router(request_builder: RequestBuilder) -> APIRouter:
    router = APIRouter()

    @router.post(
        TOKENIZE.path, responses={200: {"model": TokenizeAnswer}}, openapi_extra=request_body(TokenizeBody)
    )
    async def tokenize(http: Request) -> Response:
        return await answered(TOKENIZE, http)

    @router.post(
        DETOKENIZE.path,
        responses={200: {"model": DetokenizeAnswer}},
        openapi_extra=request_body(DetokenizeBody),
    )
    async def detokenize(http: Request) -> Response:
        return await answered(DETOKENIZE, http)

    async def answered(endpoint: Endpoint, http: Request) -> Response:
        found = await request_builder.preparer.answer(endpoint, await json_body(http), owner_of(http))
        headers = request_builder.ignored_parameters.note(found.ignored)
        return await json_response([found.body], headers)

    return router
