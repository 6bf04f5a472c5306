"""`/v1/embeddings`, `/v1/score` and `/v1/rerank` over HTTP."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from alignedserve.gateway.generation.endpoint import Endpoint, PreparedCall
from alignedserve.gateway.generation.responding import RequestBuilder, unless_gone
from alignedserve.gateway.generation.service import Slo, service_of
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.json_pieces import json_response
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.http.reading import json_body
from alignedserve.gateway.openai.embeddings.bodies import EmbeddingsBody, RerankBody, ScoreBody
from alignedserve.gateway.openai.embeddings.prepared import (
    PreparedEmbeddings,
    PreparedRerank,
    PreparedScore,
    embeddings,
    rerank,
    score,
)

EMBEDDINGS: Final = Endpoint(
    "/v1/embeddings", EmbeddingsBody, embeddings, PreparedEmbeddings, in_batches=True
)
SCORE: Final = Endpoint("/v1/score", ScoreBody, score, PreparedScore, in_batches=True)
# Jina's, Cohere's and vLLM's own path.
RERANKS: Final = tuple(
    Endpoint(path, RerankBody, rerank, PreparedRerank, in_batches=True)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank")
)
EMBEDDING_ENDPOINTS: Final = (EMBEDDINGS, SCORE, *RERANKS)

_ANSWERED: Final[dict[int | str, Any]] = {200: {"content": {"application/json": {}}}}


def embedding_routes(request_builder: RequestBuilder) -> APIRouter:
    routes = APIRouter()
    for endpoint in EMBEDDING_ENDPOINTS:
        _add(routes, endpoint, request_builder)
    return routes


def _add(routes: APIRouter, endpoint: Endpoint, request_builder: RequestBuilder) -> None:
    name = endpoint.path.strip("/").replace("/", "_")

    @routes.post(endpoint.path, name=name, responses=_ANSWERED, openapi_extra=request_body(endpoint.body))
    async def answer(http: Request) -> Response:
        owner = owner_of(http)
        preparing = request_builder.preparer.result(endpoint, await json_body(http), owner)
        call = await unless_gone(http, preparing)
        assert isinstance(call, PreparedCall)
        slo = Slo(ttft_ms=call.ttft_ms)
        service = service_of(call.service_tier, slo, http.headers, request_builder.slo)
        headers = request_builder.ignored_parameters.note(call.ignored)
        pieces, _ = await unless_gone(http, call.whole(request_builder, service, owner))
        return await json_response(pieces, headers)
