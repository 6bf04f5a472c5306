"""What every request goes through before any of it is read: who asks, whether there is room, how much it may say.

Whoever has no key gets nothing but `/health` and the page's files, which hold no data: no other route, no route that
isn't there, no OPTIONS, no docs.
What browsers ask before a call (CORS, see app.py) does not come so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alignedserve.gateway.doors import Doors
from alignedserve.gateway.errors import ApiError, unavailable
from alignedserve.gateway.keys import ANYONE, Keys
from alignedserve.gateway.limits import Limits

# A file comes in parts with headers of their own.
MULTIPART_BYTES = 64 << 10
# Methods that ask for no work: they are answered while the server stops, too.
LOOKING = ("GET", "HEAD", "OPTIONS")
# Of a body that is not wanted, so much is read and dropped, or the client would not hear why it is refused.
MAX_DROPPED_BYTES = 64 << 20
DROPPING_S = 5.0
# A body is there after this, and a second more for each so many bytes of it.
BODY_S = 30.0
MIN_BYTES_PER_S = 1024


class Gate:
    def __init__(
        self,
        app: ASGIApp,
        router: Router,
        public: Collection[Callable[..., Any]],
        keys: Keys,
        limits: Limits,
        doors: Doors,
    ) -> None:
        """`public`: the endpoints that need no key."""
        self._app = app
        self._router = router
        self._public = public
        self._keys = keys
        self._limits = limits
        self._doors = doors
        self._max_bytes: Mapping[str, int] = {"/v1/files": limits.max_file_bytes + MULTIPART_BYTES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            # there are no web sockets here
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        holder = self._keys.holder(headers.get("authorization"))
        try:
            if holder is None and not self._is_public(scope):
                raise _unauthorized("authorization" in headers)
            if self._doors.are_closed and scope["method"] not in LOOKING:
                raise unavailable("this server is stopping")
            if holder and self._doors.num_inside(holder) >= self._limits.max_requests_per_key:
                raise _too_many(self._limits.max_requests_per_key)
            max_bytes = self._max_bytes.get(scope["path"], self._limits.max_body_bytes)
            if _announced(headers) > max_bytes:
                raise _too_large(max_bytes)
        except ApiError as error:
            await _drop_body(receive, headers)
            await error.response()(scope, receive, send)
            return
        with self._doors.inside(holder or ANYONE):
            await self._app(scope, _counted(receive, max_bytes), send)

    def _is_public(self, scope: Scope) -> bool:
        for route in self._router.routes:
            match, found = route.matches(scope)
            if match is Match.FULL:
                return found.get("endpoint") in self._public
        return False


class BodyTooLarge(HTTPException):
    """It turned out to be while it was read."""


class BodyTooSlow(HTTPException):
    """Who sends it a byte at a time would keep his place for ever."""


def _counted(receive: Receive, max_bytes: int) -> Receive:
    """Of the body; what comes after it is the end of the connection, which may be long in coming."""
    num_bytes = 0
    is_whole = False
    begun_s = time.monotonic()

    async def counting() -> Message:
        nonlocal num_bytes, is_whole
        if is_whole:
            return await receive()
        due_s = begun_s + BODY_S + num_bytes / MIN_BYTES_PER_S
        try:
            async with asyncio.timeout(due_s - time.monotonic()):
                message = await receive()
        except TimeoutError:
            raise BodyTooSlow(408, f"the body comes too slowly: {num_bytes} bytes so far") from None
        is_whole = not message.get("more_body", False)
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise BodyTooLarge(413, str(_too_large(max_bytes)))
        return message

    return counting


async def _drop_body(receive: Receive, headers: Headers) -> None:
    if not _announced(headers) and "transfer-encoding" not in headers:
        return
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROPPING_S):
            while num_bytes <= MAX_DROPPED_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body"):
                    return


def _announced(headers: Headers) -> int:
    # the server has refused what is no number
    return int(headers.get("content-length", "0"))


def _unauthorized(has_key: bool) -> ApiError:
    what = "the API key is not known here" if has_key else "no API key was given"
    error = ApiError(401, f"{what}: send the header Authorization: Bearer KEY", code="invalid_api_key")
    error.headers["WWW-Authenticate"] = "Bearer"
    return error


def _too_many(limit: int) -> ApiError:
    message = (
        f"{limit} requests are under way, and at most {limit} may be: of one API key, or of all clients together "
        "where no keys are needed"
    )
    return ApiError(429, message, code="rate_limit_exceeded", retry=True)


def _too_large(max_bytes: int) -> ApiError:
    phrase = HTTPStatus(413).phrase.lower()
    return ApiError(413, f"{phrase}: the body may have at most {max_bytes} bytes", code="body_too_large")
