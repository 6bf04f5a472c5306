"""Connections to Redis, by its address.

`redis://USER:PASSWORD@HOST:PORT/DB`, `rediss://…` (with TLS) and `unix://PATH` name one server.
`redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/SERVICE/DB` and `rediss+sentinel://…` name sentinels, which know the
service's current master.

Options follow after `?`: those of redis-py, such as `ssl_ca_certs`. `sentinel_username` and `sentinel_password` apply
to the connections to the sentinels.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis.asyncio import BlockingConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff

SENTINEL = "+sentinel"
SENTINEL_PORT = 26379
# Options of the connections to sentinels.
_OWN = ("username", "password")


class RedisPool:
    """`connections` is the pool for redis-py's client. `place` is the address without user and password, for people to
    read."""

    def __init__(self, url: str, **options: Any) -> None:
        """Raises ValueError for an invalid address."""
        self._sentinel: Any = None
        scheme, _, rest = url.partition("://")
        if scheme not in (f"redis{SENTINEL}", f"rediss{SENTINEL}"):
            self.connections: Any = BlockingConnectionPool.from_url(url, **options)
            told = self.connections.connection_kwargs
            self.place: str = told.get("path") or f"{told.get('host', 'localhost')}:{told.get('port', 6379)}"
            return
        sentinels, service, plain, of_sentinel = _taken_apart(scheme.removesuffix(SENTINEL), rest)
        self.place = f"{','.join(f'{host}:{port}' for host, port in sentinels)}/{service}"
        by_url = BlockingConnectionPool.from_url(plain, **options)
        is_tls = by_url.connection_class is SSLConnection
        common = {
            name: value
            for name, value in by_url.connection_kwargs.items()
            if name.startswith(("socket_", "ssl_"))
        }
        # A sentinel that does not answer is skipped, not retried.
        common["retry"] = Retry(NoBackoff(), 0)
        if is_tls:
            common["ssl"] = True
        self._sentinel = Sentinel(sentinels, sentinel_kwargs=common | of_sentinel)  # type: ignore[no-untyped-call]
        told = {
            name: value for name, value in by_url.connection_kwargs.items() if name not in ("host", "port")
        }
        self.connections = _MasterPool(
            service_name=service,
            sentinel_manager=self._sentinel,
            connection_class=SentinelManagedSSLConnection if is_tls else SentinelManagedConnection,
            max_connections=by_url.max_connections,
            timeout=by_url.timeout,
            **told,
        )

    async def close(self) -> None:
        await self.connections.disconnect()
        if self._sentinel is not None:
            await self._sentinel.aclose()


class _MasterPool(BlockingConnectionPool, SentinelConnectionPool):
    """Waits for a free connection like the first base, and connects to the current master like the second."""


def _taken_apart(scheme: str, rest: str) -> tuple[list[tuple[str, int]], str, str, dict[str, str]]:
    """Returns the sentinels, the service's name, the URL of a server with all other options, and the sentinels'
    options."""
    place, _, query = rest.partition("?")
    hosts, _, path = place.partition("/")
    user, at, hosts = hosts.rpartition("@")
    service, _, database = path.partition("/")
    if not service:
        raise ValueError(f"{scheme}{SENTINEL}://…: the name of the service is missing after the sentinels")
    given = parse_qsl(query)
    of_sentinel = {
        name: value
        for key, value in given
        for name in (key.removeprefix("sentinel_"),)
        if key != name and name in _OWN
    }
    others = urlencode([(key, value) for key, value in given if key.removeprefix("sentinel_") == key])
    plain = f"{scheme}://{user}{at}sentinel/{database}?{others}"
    return [_host_and_port(host) for host in hosts.split(",")], service, plain, of_sentinel


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r}: is not HOST:PORT of a sentinel")
    return parts.hostname, parts.port or SENTINEL_PORT
