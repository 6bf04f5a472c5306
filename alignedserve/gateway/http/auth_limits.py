"""The checks of every request before its body is read: its API key, the server's limits, its announced length.

If no keys are needed, any web page may make a user's browser send requests: see callers.py.

A client without a key gets only `/health` and the page's files, which hold no data: no other route, no OPTIONS, no
docs. The same error is returned for routes that do not exist. Preflight requests of browsers (CORS, gateway/app.py) are
answered before they arrive here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from alignedserve.gateway.http.callers import ANY_CALLER, LOOKING, Callers
from alignedserve.gateway.http.errors import ApiError, unavailable
from alignedserve.gateway.http.keys import ANYONE, EXPIRED, Keys
from alignedserve.gateway.http.reading import BodyMemory, BodyReading, Share
from alignedserve.gateway.http.request_id import current_call
from alignedserve.gateway.limits.limits import Limits
from alignedserve.store.contents import CHUNK_BYTES


class DrainState:
    def __init__(self) -> None:
        self._draining = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_open: Counter[str] = Counter()

    @property
    def is_draining(self) -> bool:
        return self._draining.is_set()

    def num_open(self, owner: str) -> int:
        return self._num_open[owner]

    @contextmanager
    def counted(self, owner: str) -> Iterator[None]:
        """Counts a request of `owner` as running, until the block ends."""
        self._num_open[owner] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open[owner] -= 1
            if not self._num_open[owner]:
                del self._num_open[owner]
            if not self._num_open:
                self._idle.set()

    def begin(self) -> None:
        """Stops accepting new requests. Safe to repeat."""
        self._draining.set()

    async def until_draining(self) -> None:
        await self._draining.wait()

    async def until_idle(self) -> None:
        await self._idle.wait()


# Bytes of an upload's body besides its file, at most: its parts have headers of their own.
MULTIPART_BYTES = 64 << 10
# Load balancers request this path under names of their own, so its Host is not checked. It holds no data and changes
# nothing.
PROBED = "/health"


@dataclass(frozen=True)
class Access:
    """What decides whether a request is accepted."""

    # Bounds the bodies in memory.
    memory: BodyMemory
    limits: Limits = field(default_factory=Limits)
    keys: Keys = field(default_factory=Keys)
    drain_state: DrainState = field(default_factory=DrainState)
    callers: Callers = ANY_CALLER


class AuthLimitsMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        router: Router,
        public: Collection[Callable[..., Any]],
        access: Access,
    ) -> None:
        """`public` are the endpoints that need no key."""
        self._app = app
        self._router = router
        self._public = public
        self._access = access
        self._limits = limits = access.limits
        # By path: the largest body in bytes, and how much of it is in memory at a time, since files are passed to the
        # store in chunks.
        self._max_bytes: Mapping[str, tuple[int, int]] = {
            "/v1/files": (limits.max_file_bytes + MULTIPART_BYTES, CHUNK_BYTES),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            # There are no WebSockets here.
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        owner = self._access.keys.owner(_authorization(headers))
        if call := current_call.get():
            call.owner = owner or ANYONE
        max_bytes = self._max_bytes.get(scope["path"], (self._limits.max_body_bytes,) * 2)
        with self._access.memory.share(owner or ANYONE) as share:
            reading = BodyReading(receive, headers, share, *max_bytes)
            send = reading.answering(send)
            refusal = self._refusal(scope, headers, owner) or reading.refusal()
            if refusal:
                await reading.drop()
                await refusal.response(scope["path"])(scope, receive, send)
                return
            scope.setdefault("state", {}).update(owner=owner or ANYONE, share=share)
            with self._access.drain_state.counted(owner or ANYONE):
                await self._app(scope, reading.receive, send)

    def _refusal(self, scope: Scope, headers: Headers, owner: str | None) -> ApiError | None:
        if scope["path"] != PROBED and (refusal := self._access.callers.refusal(scope["method"], headers)):
            return refusal
        if owner is None and not self._is_public(scope):
            if self._access.keys.are_expired:
                return unavailable(EXPIRED)
            return _unauthorized(_authorization(headers) is not None)
        if self._access.drain_state.is_draining and scope["method"] not in LOOKING:
            return unavailable("this server is stopping")
        if (
            owner is not None
            and self._access.drain_state.num_open(owner) >= self._limits.max_requests_per_key
        ):
            return _too_many(self._limits.max_requests_per_key)
        return None

    def _is_public(self, scope: Scope) -> bool:
        for route in self._router.routes:
            match, found = route.matches(scope)
            if match is Match.FULL:
                return found.get("endpoint") in self._public
        return False


def body_memory(limits: Limits, keys: Keys) -> BodyMemory:
    # If no keys are needed, all clients are one owner, which may have all of the memory.
    needs_keys = keys.owner(None) is None
    return BodyMemory(limits.max_total_body_bytes, 0.5 if needs_keys else 1.0)


def share_of(http: Request) -> Share:
    """Returns the request's share of the memory for bodies."""
    share: Share = http.state.share
    return share


def _authorization(headers: Headers) -> str | None:
    """Returns the key as an Authorization header. Anthropic's clients send it in a header of its own."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (None if key is None else f"Bearer {key}")


def _unauthorized(has_key: bool) -> ApiError:
    what = "the API key is unknown" if has_key else "no API key was given"
    error = ApiError(401, f"{what}: send the header Authorization: Bearer KEY", code="invalid_api_key")
    error.headers["WWW-Authenticate"] = "Bearer"
    return error


def _too_many(limit: int) -> ApiError:
    message = (
        f"{limit} requests are open, and at most {limit} may be: for one API key, or of all clients together if the "
        "server needs no key"
    )
    return ApiError(429, message, code="rate_limit_exceeded", retry=True)
