"""Gives each HTTP call an id: the client's, if it sends a usable one, or else a new one. The id is in the answer's
headers and in each log line about the call."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alignedserve.gateway.http.errors import AnswerBrokenOff
from alignedserve.gateway.http.keys import name_of
from alignedserve.process.logs import request_id
from alignedserve.types import shortened

logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
_USABLE = re.compile(r"[A-Za-z0-9._:+/=@-]{1,128}")
# Paths that machines and the page poll.
ROUTINE = ("/health", "/metrics", "/v1/cluster", "/v1/batches", "/", "/page/{name}")

# Statuses of calls outside of all routes, for which the path is logged, and its most characters.
_UNKNOWN = (403, 404, 405)
_MAX_PATH_CHARS = 200

# The HTTP call that is being answered in this context.
current_call: ContextVar[CurrentCall | None] = ContextVar("current_call", default=None)


@dataclass(eq=False)
class CurrentCall:
    id: str
    method: str
    headers: Headers
    begun_s: float = field(default_factory=lambda: time.monotonic())
    # The path of its route, without the client's values.
    path: str = "-"
    # The path that the client chose.
    asked_path: str = ""
    status: int = 0
    is_answered: bool = False
    # Whether the call has ended. Work that it has begun and that continues, such as a job, is not part of it.
    is_over: bool = False
    # The owner of its API key (keys.py).
    owner: str = ""
    # The class of its requests, and their numbers of tokens. The tokens of a prompt count once for each choice.
    tier: str = ""
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    # The context of its trace. None: it has no trace.
    trace: Any = None

    @property
    def is_routine(self) -> bool:
        return self.path in ROUTINE and self.method in ("GET", "HEAD")


# Makes the context manager around a call: the span of its trace.
Around = Callable[[CurrentCall], AbstractContextManager[object]]


class RequestIdMiddleware:
    """The outermost ASGI application, so that errors outside of the routes have an id, too."""

    def __init__(self, app: ASGIApp, around: Around = lambda call: nullcontext()) -> None:
        self._app = app
        self._around = around

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        call = CurrentCall(_id_of(headers), scope["method"], headers, asked_path=scope["path"])

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.body":
                call.is_answered = not message.get("more_body", False)
            elif message["type"] == "http.response.start":
                call.status = message["status"]
                MutableHeaders(scope=message)[HEADER] = call.id
            await send(message)

        id_token, call_token = request_id.set(call.id), current_call.set(call)
        try:
            with self._around(call):
                try:
                    await self._app(scope, receive, send_with_id)
                except ClientDisconnect:
                    # The client disconnected in the middle of a body. Proxies log that as 499.
                    call.status = 499
                except AnswerBrokenOff as error:
                    logger.warning("broken off: %s", error)
                    raise
                except Exception:
                    # Logged here, where the call's id is known. Raised only if there is no answer yet, because the
                    # server logs it again.
                    logger.exception("failed")
                    if not call.is_answered:
                        raise
                finally:
                    call.path = getattr(scope.get("route"), "path", "-")
            _log(call)
        finally:
            call.is_over = True
            current_call.reset(call_token)
            request_id.reset(id_token)


def _id_of(headers: Headers) -> str:
    given = headers.get(HEADER, "")
    return given if _USABLE.fullmatch(given) else secrets.token_hex(16)


def _path_of(call: CurrentCall) -> str:
    """Returns the path of its route, or, for a call that has none, what the client asked for. Formatters escape it."""
    is_unknown = call.path == "-" and call.status in _UNKNOWN
    return shortened(call.asked_path, _MAX_PATH_CHARS) if is_unknown else call.path


def _log(call: CurrentCall) -> None:
    seconds = round(time.monotonic() - call.begun_s, 4)
    said: dict[str, object] = {
        "method": call.method,
        "path": _path_of(call),
        "status": call.status,
        "seconds": seconds,
    }
    if call.tier:
        said["class"] = call.tier
        said["prompt_tokens"] = call.num_prompt_tokens
        said["completion_tokens"] = call.num_completion_tokens
    if call.owner:
        said["key"] = name_of(call.owner)
    # Routine calls are logged at debug level.
    level = logging.DEBUG if call.is_routine else logging.INFO
    logger.log(level, "answered", extra={"fields": said})
