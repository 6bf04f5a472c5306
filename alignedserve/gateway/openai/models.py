"""`/v1/models`: the served model and its adapters."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from alignedserve.gateway.http.json_pieces import Json
from alignedserve.gateway.model.served_model import ServedModel


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
    """Describes the model under `name`, which is one of its names."""
    body = {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "alignedserve",
        "max_model_len": model.max_model_len,
        # vLLM's fields: the path of the model's files, here its name, and the base model of an adapter.
        "root": name,
        "parent": model.name if model.adapter_of(name) else None,
    }
    return body
