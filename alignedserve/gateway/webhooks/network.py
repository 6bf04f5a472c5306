"""Connects only to public addresses, so that webhooks can't reach services that only this server can reach.

A name is looked up once per connection. Its addresses are checked, and the connection goes to one of them, so DNS
rebinding has no effect. TLS still checks the name.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any

import httpcore2

# IPv6 addresses that stand for IPv4 addresses and are translated by a gateway (NAT64).
_NAT64 = IPv6Network("64:ff9b::/96")


class AddressNotAllowed(httpcore2.ConnectError):
    """The URL leads to an address that is not public."""


class PublicNetwork(httpcore2.AsyncNetworkBackend):
    def __init__(self, allows_private: bool = False) -> None:
        self._allows_private = allows_private
        self._network = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Raises AddressNotAllowed, and ConnectError if none of the addresses can be reached."""
        addresses = await _addresses_of(host, port)
        if not self._allows_private and not all(map(is_public, addresses)):
            raise AddressNotAllowed("its address is not public")
        error = httpcore2.ConnectError("its name has no address")
        for address in addresses:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except httpcore2.ConnectError as found:
                error = found
        raise error

    async def sleep(self, seconds: float) -> None:
        await self._network.sleep(seconds)


async def _addresses_of(host: str, port: int) -> list[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise httpcore2.ConnectError(f"its name can't be looked up: {error.strerror}") from None
    except UnicodeError:
        # A label of it is empty, or has more than 63 characters.
        raise httpcore2.ConnectError("its name is not valid") from None
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Returns whether the address is public."""
    try:
        found = _plain(ip_address(address))
    except ValueError:
        return False
    if isinstance(found, IPv6Address) and (found.is_site_local or found.sixtofour or found.teredo):
        return False
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Returns the IPv4 address that an IPv6 address stands for, or else the address itself."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped:
            return address.ipv4_mapped
        if address in _NAT64 or int(address) >> 32 == 0:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address
