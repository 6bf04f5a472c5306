"""`/v1/embeddings`, `/pooling`, `/v1/score` and `/v1/rerank` over HTTP."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from alignedserve.gateway.generation.call import Call
from alignedserve.gateway.generation.endpoint import Endpoint
from alignedserve.gateway.generation.responding import RequestBuilder, read_call, respond
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.openai.embeddings.bodies import (
    EmbeddingsBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from alignedserve.gateway.openai.embeddings.prepared import (
    EmbeddingsSpec,
    PoolingSpec,
    RerankSpec,
    ScoreSpec,
    classify,
    embeddings,
    pooling,
    rerank,
    score,
)

EMBEDDINGS: Final = Endpoint(
    "/v1/embeddings", EmbeddingsBody, embeddings, Call[EmbeddingsSpec], in_batches=True
)
POOLING: Final = Endpoint("/pooling", PoolingBody, pooling, Call[PoolingSpec], in_batches=True)
CLASSIFY: Final = Endpoint("/classify", EmbeddingsBody, classify, Call[EmbeddingsSpec])
SCORE: Final = Endpoint("/v1/score", ScoreBody, score, Call[ScoreSpec], in_batches=True)
# vLLM's older path.
PLAIN_SCORE: Final = Endpoint("/score", ScoreBody, score, Call[ScoreSpec], in_batches=True)
# Jina's, Cohere's and vLLM's own path.
RERANKS: Final = tuple(
    Endpoint(path, RerankBody, rerank, Call[RerankSpec], in_batches=True)
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
        call = await read_call(http, endpoint, request_builder)
        return await respond(http, call, request_builder)
