"""The checks of every request before its body is read: the page that sends it, its API key, the server's limits, its
announced length.

A client without a key gets only `/health`, `/ping` and the page's files, which hold no data: no other route, no
OPTIONS, no docs. The same error is returned for routes that do not exist. Some routes need more than a client's key
(`require_counters`, `require_operator`). Preflight requests of browsers (CORS, gateway/app.py) are answered before they
arrive here.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from alignedserve.gateway.http.errors import ApiError, unavailable
from alignedserve.gateway.http.keys import ANYONE, EXPIRED, Keys, authorizations_of, is_operator
from alignedserve.gateway.http.reading import BodyMemory, BodyReading, Share
from alignedserve.gateway.http.request_id import current_call
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.store.contents import CHUNK_BYTES

# ---- web pages -------------------------------------------------------------------------------------------------------

# Any web page may make a browser send requests, but a page can't set these headers: Host, Origin and Sec-Fetch-Site.
#
# A server on this machine or in a network that needs no key can be reached from any web page, through a user's browser.
# Two checks keep such pages out.
#
# - A page's own name may resolve to this machine (DNS rebinding), so the browser considers both one origin. But the
#   browser sends that name in Host, which has to be a known name of this server. An address as Host is safe, since no
#   name was resolved.
# - A page can send a form or a file anywhere, without reading the answer. The browser sends the page's origin. A
#   request that changes anything must come from this server's own page, or from an allowed origin.
#
# With API keys neither is checked, unless hosts are configured: a page does not have the key, and no browser adds it. A
# client that is no browser can send any header, and needs no page to send requests.


# These methods change nothing. They are answered while the server stops, too.
LOOKING = ("GET", "HEAD", "OPTIONS")
ANY = "*"
# A host, with or without a port.
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{0,5})?")


@dataclass(frozen=True)
class Callers:
    """By default requests may have any Host, and pages of any origin may change something."""

    names: frozenset[str] = frozenset((ANY,))
    takes_loopback: bool = False
    takes_addresses: bool = False
    # None: pages of any origin may change something.
    origins: frozenset[str] | None = None

    def refusal(self, method: str, headers: Headers) -> ApiError | None:
        host = headers.get("host")
        # A client without a Host header is no browser.
        if host is not None and not self._knows(host):
            return ApiError(403, f"Host {host!r}: {_HOST_HELP}", code="host_not_allowed")
        if method in LOOKING or self.origins is None or ANY in self.origins:
            return None
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if origin in self.origins or site == "same-origin":
            return None
        is_foreign = not _is_of(origin, host) if origin is not None else site == "same-site"
        if is_foreign or site == "cross-site":
            return ApiError(403, f"Origin {origin!r}: {_ORIGIN_HELP}", code="origin_not_allowed")
        return None

    def _knows(self, host: str) -> bool:
        if ANY in self.names:
            return True
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = plain(found[1])
        if name in self.names:
            return True
        if name == "localhost":
            return self.takes_loopback
        address = _address(name)
        if address is None:
            return False
        return self.takes_addresses or (self.takes_loopback and address.is_loopback)


# Accepts all callers: if keys are needed, and in tests of other parts.
ANY_CALLER = Callers()
_HOST_HELP = "not a known name of this server; the operator can add it with --allowed-hosts"
_ORIGIN_HELP = "its pages may not change anything here; the operator can allow it with --allowed-origins"


def callers_of(
    listened_on: Collection[str], hosts: Collection[str], origins: Collection[str], needs_keys: bool
) -> Callers:
    """`listened_on` has the name or address from the operator, and the address that it resolves to."""
    if needs_keys and not hosts:
        return ANY_CALLER
    names = {plain(host) for host in (*listened_on, *hosts) if host}
    addresses = [address for host in listened_on if (address := _address(plain(host)))]
    is_everywhere = any(address.is_unspecified for address in addresses)
    is_here = any(address.is_loopback for address in addresses)
    if not is_here:
        names.add(socket.gethostname().lower())
    return Callers(
        frozenset(names), is_here or is_everywhere, is_everywhere, None if needs_keys else frozenset(origins)
    )


def plain(host: str) -> str:
    """Returns the form in which hosts are compared."""
    name = host.lower().removeprefix("[").removesuffix("]").removesuffix(".")
    return str(_address(name) or name)


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _is_of(origin: str, host: str | None) -> bool:
    """Returns whether the origin is this host. A proxy in front may or may not use TLS."""
    return host is not None and origin.lower().partition("://")[2] == host.lower()


# ---- every request ---------------------------------------------------------------------------------------------------


AddChoices = Callable[[int], None]


class DrainState:
    def __init__(self) -> None:
        # Whether new requests are refused.
        self.is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_open: Counter[str] = Counter()

    def num_open(self, owner: str) -> int:
        return self._num_open[owner]

    @property
    def num_open_of_all(self) -> int:
        return self._num_open.total()

    @contextmanager
    def counted(self, owner: str, most: int) -> Iterator[AddChoices]:
        """Counts a request of `owner` as running, until the block ends. Yields a function that counts it as several,
        and raises ApiError if the owner would have more than `most`."""
        num_own = 1

        def add_choices(num_choices: int) -> None:
            nonlocal num_own
            if num_choices > most:
                raise _never(most, num_choices)
            num_more = max(num_choices - num_own, 0)
            if num_more and self._num_open[owner] + num_more > most:
                raise _too_many(most, self._num_open[owner] - num_own, num_choices)
            self._num_open[owner] += num_more
            num_own += num_more

        self._num_open[owner] += 1
        self._idle.clear()
        try:
            yield add_choices
        finally:
            self._num_open[owner] -= num_own
            if not self._num_open[owner]:
                del self._num_open[owner]
            if not self._num_open:
                self._idle.set()

    def begin(self) -> None:
        """Stops accepting new requests. Safe to repeat."""
        self.is_draining = True

    async def until_idle(self) -> None:
        await self._idle.wait()


# Bytes of an upload's body besides its file, at most: its parts have headers of their own.
MULTIPART_BYTES = 64 << 10
# Load balancers request these paths under names of their own, so their Host is not checked. They hold no data and
# change nothing.
PROBED = ("/health", "/ping")


@dataclass(frozen=True)
class Access:
    """What decides whether a request is accepted."""

    # Bounds the bodies in memory.
    memory: BodyMemory
    limits: CallLimits = field(default_factory=CallLimits)
    keys: Keys = field(default_factory=Keys)
    drain_state: DrainState = field(default_factory=DrainState)
    callers: Callers = ANY_CALLER
    # Whether only this machine reaches the server.
    is_on_loopback: bool = False

    def rights_of(self, owner: str) -> dict[str, bool]:
        """Returns what a request of `owner` may do beyond its own data (`require_counters`, `require_operator`)."""
        is_open_here = not self.keys.are_needed and self.is_on_loopback
        return {
            "is_operator": is_operator(owner) or is_open_here,
            "may_read_counters": self.keys.may_read_counters(owner),
        }


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
        self._max_requests = limits.max_requests(access.keys.owner(None) is None)
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
        given = authorizations_of(headers)
        owner = self._access.keys.owner(given[0])
        if call := current_call.get():
            call.owner = owner or ANYONE
        max_bytes = self._max_bytes.get(scope["path"], (self._limits.max_body_bytes,) * 2)
        with self._access.memory.share(owner or ANYONE) as share:
            reading = BodyReading(receive, headers, share, *max_bytes)
            send = reading.answering(send)
            refusal = self._refusal(scope, headers, owner, given) or reading.refusal()
            if refusal:
                await reading.drop()
                await refusal.response(scope)(scope, receive, send)
                return
            state = scope.setdefault("state", {})
            state.update(self._access.rights_of(owner or ANYONE), owner=owner or ANYONE, share=share)
            with self._access.drain_state.counted(owner or ANYONE, self._max_requests) as add_choices:
                state["add_choices"] = add_choices
                await self._app(scope, reading.receive, send)

    def _refusal(
        self, scope: Scope, headers: Headers, owner: str | None, given: Sequence[str | None]
    ) -> ApiError | None:
        if scope["path"] not in PROBED and (
            refusal := self._access.callers.refusal(scope["method"], headers)
        ):
            return refusal
        if len(given) > 1 and self._access.keys.are_needed:
            return ApiError(
                400, "there are several API keys: send one, in one header", code="invalid_api_key"
            )
        if owner is None and not self._is_public(scope):
            if self._access.keys.are_expired:
                return unavailable(EXPIRED)
            return _unauthorized(given != [None])
        if self._access.drain_state.is_draining and scope["method"] not in LOOKING:
            return unavailable("this server is stopping")
        num_open = self._access.drain_state.num_open(owner or ANYONE)
        if num_open >= self._max_requests and owner is not None and not _is_always_taken(scope):
            return _too_many(self._max_requests, num_open, 1)
        return None

    def _is_public(self, scope: Scope) -> bool:
        for route in self._router.routes:
            match, found = route.matches(scope)
            if match is Match.FULL:
                return found.get("endpoint") in self._public
        return False


def _is_always_taken(scope: Scope) -> bool:
    """Returns whether the number of open requests does not limit this one: it only looks, or ends others."""
    return scope["method"] in (*LOOKING, "DELETE") or scope["path"].endswith("/cancel")


def body_memory(limits: CallLimits, keys: Keys) -> BodyMemory:
    # If no keys are needed, all clients are one owner, which may have all of the memory.
    needs_keys = keys.owner(None) is None
    return BodyMemory(limits.max_total_body_bytes, 0.5 if needs_keys else 1.0)


def share_of(http: Request) -> Share:
    """Returns the request's share of the memory for bodies."""
    share: Share = http.state.share
    return share


def require_counters(http: Request) -> None:
    """For routes that show counts of all clients. Everyone may read them if the server needs no key; so may an
    operator's key; and an API key if there is no other owner and no operator's key. Raises ApiError 403."""
    if not http.state.may_read_counters:
        raise _forbidden("this shows counts of all clients")


def require_operator(http: Request) -> None:
    """For routes that change the server for all clients. They need an operator's key, or a server without any keys that
    listens on loopback. Raises ApiError 403."""
    if not http.state.is_operator:
        raise _forbidden("this changes the server for all clients")


def _forbidden(what: str) -> ApiError:
    message = f"{what}, and needs an operator's key: see --operator-key"
    return ApiError(403, message, code="operator_key_required")


def _unauthorized(has_key: bool) -> ApiError:
    what = "the API key is unknown" if has_key else "no API key was given"
    error = ApiError(401, f"{what}: send the header Authorization: Bearer KEY", code="invalid_api_key")
    error.headers["WWW-Authenticate"] = "Bearer"
    return error


def add_choices(http: Request, num_choices: int) -> None:
    """Counts a call as its number of choices or inputs. Raises ApiError if its API key would have too many."""
    add: AddChoices = http.state.add_choices
    add(num_choices)


def _never(limit: int, num_choices: int) -> ApiError:
    message = (
        f"this call is {num_choices} requests, because each choice and input counts, and one API key may have at most "
        f"max_requests_per_key={limit} open: send several smaller calls"
    )
    return ApiError(400, message, code="too_many_choices")


def _too_many(limit: int, num_open: int, num_more: int) -> ApiError:
    message = (
        f"{num_open} requests are open, and {num_more} more would exceed max_requests_per_key={limit}: for one API "
        "key, or of all clients together if the server needs no key. Each choice counts"
    )
    return ApiError(429, message, code="rate_limit_exceeded", retry=True)
