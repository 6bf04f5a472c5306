"""Which web pages may make a browser send requests, by headers that a page can't set: Host, Origin and Sec-Fetch-Site.

A server on this machine or in a network that needs no key can be reached from any web page, through a user's browser.
Two checks keep such pages out.

- A page's own name may resolve to this machine (DNS rebinding), so the browser considers both one origin. But the
  browser sends that name in Host, which has to be a known name of this server. An address as Host is safe, since no
  name was resolved.
- A page can send a form or a file anywhere, without reading the answer. The browser sends the page's origin. A request
  that changes anything must come from this server's own page, or from an allowed origin.

With API keys neither is checked, unless hosts are configured: a page does not have the key, and no browser adds it. A
client that is no browser can send any header, and needs no page to send requests.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.datastructures import Headers

from alignedserve.gateway.http.errors import ApiError

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
