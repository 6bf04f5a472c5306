"""`/tokenize` and `/detokenize` over HTTP."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.json_body import json_body
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.openai.preparer import Preparer
from alignedserve.gateway.openai.token_bodies import (
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
)


def tokens_router(preparer: Preparer) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/tokenize", responses={200: {"model": TokenizeAnswer}}, openapi_extra=request_body(TokenizeBody)
    )
    async def tokenize(http: Request) -> Response:
        return await answered("/tokenize", http)

    @router.post(
        "/detokenize",
        responses={200: {"model": DetokenizeAnswer}},
        openapi_extra=request_body(DetokenizeBody),
    )
    async def detokenize(http: Request) -> Response:
        return await answered("/detokenize", http)

    async def answered(endpoint: str, http: Request) -> Response:
        found = await preparer.answer(endpoint, await json_body(http), owner_of(http))
        return Response(found, media_type="application/json")

    return router
