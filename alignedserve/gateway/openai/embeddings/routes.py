"""`/v1/embeddings`, `/pooling`, `/v1/score` and `/v1/rerank` over HTTP."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from alignedserve.gateway.generation.endpoint import Endpoint, PreparedCall
from alignedserve.gateway.generation.responding import RequestBuilder, unless_gone
from alignedserve.gateway.generation.service import Slo, service_of
from alignedserve.gateway.http.access import add_choices
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.json_pieces import json_response
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.http.reading import json_body
from alignedserve.gateway.openai.embeddings.bodies import (
    EmbeddingsBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from alignedserve.gateway.openai.embeddings.prepared import (
    PreparedEmbedding,
    PreparedEmbeddings,
    PreparedPooling,
    PreparedRerank,
    PreparedScore,
    classify,
    embeddings,
    pooling,
    rerank,
    score,
)

EMBEDDINGS: Final = Endpoint(
    "/v1/embeddings", EmbeddingsBody, embeddings, PreparedEmbeddings, in_batches=True
)
POOLING: Final = Endpoint("/pooling", PoolingBody, pooling, PreparedPooling, in_batches=True)
CLASSIFY: Final = Endpoint("/classify", EmbeddingsBody, classify, PreparedEmbedding)
SCORE: Final = Endpoint("/v1/score", ScoreBody, score, PreparedScore, in_batches=True)
# vLLM's older path.
PLAIN_SCORE: Final = Endpoint("/score", ScoreBody, score, PreparedScore, in_batches=True)
# Jina's, Cohere's and vLLM's own path.
RERANKS: Final = tuple(
    Endpoint(path, RerankBody, rerank, PreparedRerank, in_batches=True)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank")
)
EMBEDDING_ENDPOINTS: Final = (EMBEDDINGS, POOLING, CLASSIFY, SCORE, PLAIN_SCORE, *RERANKS)

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
        preparing = request_builder.preparer.result(endpoint, await json_body(http), owner_of(http))
        call = await unless_gone(http, preparing)
        assert isinstance(call, PreparedCall)
        return await respond_with_vectors(http, call, request_builder)


async def respond_with_vectors(
    http: Request, call: PreparedCall, request_builder: RequestBuilder
) -> Response:
    """Runs a call for embeddings and sends its answer. Raises ApiError and InvalidRequest."""
    service = service_of(call.service_tier, Slo(ttft_ms=call.ttft_ms), http.headers, request_builder.slo)
    headers = request_builder.ignored_parameters.note(call.ignored)
    add_choices(http, len(call.prompts))
    pieces, _ = await unless_gone(http, call.whole(request_builder, service, owner_of(http)))
    return await json_response(pieces, headers)
