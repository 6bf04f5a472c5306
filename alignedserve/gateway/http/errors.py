"""OpenAI's error envelope, {"error": {"message", "type", "param", "code"}}, for all errors, wherever they occur. Calls
of Anthropic's API get Anthropic's envelope: by their path, or by the header that its clients send with all calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from alignedserve.store import StoreAway
from alignedserve.types import InvalidRequest, shortened

RETRY_AFTER_S = 1
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
ANTHROPIC_PATH, ANTHROPIC_HEADER = "/v1/messages", "anthropic-version"
# Code of a call that asks the server to store its conversation. If an error's details have it, Anthropic's client
# retries with the whole conversation; it does not after other errors.
THREAD_UNSUPPORTED = "thread_unsupported_request"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Longest message, in characters: it may repeat what a client sent.
MAX_MESSAGE_CHARS = 1000


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry: bool = False,
    ) -> None:
        """With `retry`, the answer says that the same request may succeed a moment later."""
        super().__init__(message)
        self.status = status
        self.message = _sayable(message)
        self.param = None if param is None else _sayable(param)
        self.code = code
        self.headers = {"Retry-After": str(RETRY_AFTER_S)} if retry else {}

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "api_error"
        )
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.code == THREAD_UNSUPPORTED:
            error["details"] = {"error_code": self.code, "unsupported": [self.param]}
        return {"type": "error", "error": error}

    def body_for(self, path: str, headers: Collection[str] = ()) -> dict[str, Any]:
        """Returns the error's body in the envelope of the request's API. `path` and `headers` are those of the
        request."""
        is_anthropic = path.startswith(ANTHROPIC_PATH) or ANTHROPIC_HEADER in headers
        return self.anthropic_body if is_anthropic else self.body

    def response(self, scope: Scope) -> JSONResponse:
        """Returns the answer to the request of `scope`."""
        body = self.body_for(scope["path"], Headers(scope=scope))
        return JSONResponse(body, self.status, self.headers)


class BodyError(HTTPException):
    """An error that is found while a body is read. FastAPI would report any other exception as a body that can't be
    parsed."""

    def __init__(self, found: ApiError) -> None:
        super().__init__(found.status, str(found))
        self.found = found


class AnswerBrokenOff(Exception):
    """The rest of an answer can't be produced. The connection is closed, so that the client notices."""


def _sayable(text: str) -> str:
    """Returns a text that an answer can contain. What a client sent may be long, and may contain half of a surrogate
    pair."""
    plain = shortened(text, MAX_MESSAGE_CHARS).encode("utf-8", "backslashreplace").decode()
    return shortened(plain, MAX_MESSAGE_CHARS)


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="overloaded", retry=True)


def invalid(error: ValueError) -> ApiError:
    """Returns the error for an invalid value. Its message begins with the name of the parameter: "top_p=2: must be
    ..."."""
    name = re.match(r"[a-z_]+(?=[=:\[ .])", str(error))
    return ApiError(400, str(error), param=name[0] if name else None)


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(InvalidRequest, _invalid_request)
    app.add_exception_handler(StoreAway, _store_away)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response(request.scope)


async def _invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, InvalidRequest)
    return invalid(error).response(request.scope)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if isinstance(first.get("input"), bytes):
        message = "the body must be JSON, and come with the header Content-Type: application/json"
        return ApiError(400, message).response(request.scope)
    # The location begins with where the value was sent: "body", "query", ...
    return misshapen(first, first["loc"][1:]).response(request.scope)


def misshapen(first: Mapping[str, Any], location: Sequence[str | int]) -> ApiError:
    """Returns the error for a value of wrong shape. `first` is pydantic's first error, and `location` its place."""
    path = [str(part) for part in location]
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        message = f"{name}: unknown, or not supported by this server"
    elif first["type"] == "json_invalid":
        # The location is a position in the text.
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body is not valid JSON: {reason}, at character {path[-1]}")
    else:
        message = f"{name or 'the body'}: {first['msg']}"
    return ApiError(400, message, param=path[0] if path else None)


async def _store_away(request: Request, error: Exception) -> JSONResponse:
    # The reason is only logged, since it names places on this machine.
    return unavailable("files and batches: the store can't be reached now").response(request.scope)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, BodyError):
        return error.found.response(request.scope)
    phrase = HTTPStatus(error.status_code).phrase
    place = f"{request.method} {request.url.path}: {phrase.lower()}"
    found = ApiError(error.status_code, place if error.detail == phrase else error.detail)
    found.headers |= error.headers or {}
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # The route that refused the method knows only its own methods.
        found.headers["Allow"] = ", ".join(_methods(request))
    return found.response(request.scope)


def _methods(request: Request) -> list[str]:
    """The methods that exist for the request's path."""
    routes = request.app.router.routes
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    return [
        method
        for method, scope in scopes.items()
        if any(route.matches(scope)[0] is Match.FULL for route in routes)
    ]


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    # The server logs the error with its traceback.
    return ApiError(500, f"internal error: {type(error).__name__}").response(request.scope)
