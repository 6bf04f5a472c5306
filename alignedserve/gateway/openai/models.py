"""/v1/models: the one model that is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from alignedserve.gateway.http.json_pieces import Json
from alignedserve.gateway.model import ServedModel


def model_routes(model: ServedModel) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [_model_body(model)]}

    @routes.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Json:
        model.check_name(name)
        return _model_body(model)

    return routes


def _model_body(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "alignedserve",
        "max_model_len": model.max_model_len,
    }
