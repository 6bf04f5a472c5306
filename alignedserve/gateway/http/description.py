"""The OpenAPI description. Each operation lists its errors, in the envelope of its API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from alignedserve.gateway.http.errors import ANTHROPIC_PATH

_REFERENCE = "#/components/schemas/{model}"

ERRORS = {
    "400": "A parameter is invalid: `param` and the message name it",
    "401": "The API key is missing or unknown",
    "403": "Not allowed to this key, host name or page: the message names the option",
    "404": "Not found",
    "413": "The body is too large",
    "429": "Too many open requests of this API key, or of all clients together if the server needs no key",
    "500": "Internal error",
    "503": "Temporarily unavailable: see Retry-After",
}
_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_FIELDS = {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": _TEXT_OR_NULL,
    "code": _TEXT_OR_NULL,
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": list(_FIELDS), "properties": _FIELDS}},
}


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """Describes the body of an operation that parses it itself."""
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> Callable[[], dict[str, Any]]:
    """Returns a replacement for `app.openapi`. `bodies` are the models that `request_body` refers to."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        found = plain()
        schemas = found.setdefault("components", {}).setdefault("schemas", {})
        if "Error" not in schemas:
            schemas |= {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
            schemas |= _schemas(bodies)
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            for path, operations in found["paths"].items():
                name = "AnthropicError" if path.startswith(ANTHROPIC_PATH) else "Error"
                for operation in operations.values():
                    operation["responses"] = _responses(operation["responses"], name)
        return found

    return described


def _schemas(bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    _, found = models_json_schema([(body, "validation") for body in bodies], ref_template=_REFERENCE)
    return cast(dict[str, Any], found["$defs"])


def _responses(plain: dict[str, Any], error: str) -> dict[str, Any]:
    schema = {"$ref": _REFERENCE.format(model=error)}
    errors = {
        status: {"description": text, "content": {"application/json": {"schema": schema}}}
        for status, text in ERRORS.items()
    }
    # A route's own description of a status takes precedence.
    return errors | {status: answer for status, answer in plain.items() if status != "422"}
