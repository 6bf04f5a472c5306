"""/v1/models: the model that is served, and its adapters."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from alignedserve.gateway.http.json_pieces import Json
from alignedserve.gateway.model import ServedModel


def model_routes(model: ServedModel) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [_model_body(model, name) for name in model.names]}

    @routes.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Json:
        model.check_name(name)
        return _model_body(model, name)

    return routes


def _model_body(model: ServedModel, name: str) -> dict[str, Any]:
    """`name`: one of its names."""
    body = {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "alignedserve",
        "max_model_len": model.max_model_len,
        # vLLM's fields: the base model of an adapter, and where a model is, which is nobody's concern here.
        "root": name,
        "parent": model.name if model.adapter_of(name) else None,
    }
    return body
