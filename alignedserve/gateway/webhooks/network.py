"""Connects only to public addresses, so that webhooks can't reach services that only this server can reach.

A name is looked up once per connection. Its addresses are checked, and the connection goes to one of them, so DNS
rebinding has no effect. TLS still checks the name.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address
from typing import Any

import httpcore2

# The networks below are those of IANA's registries of special-purpose addresses, as of 2026: Python's own tables differ
# between its patch versions. Anycast services within them are left out too.
_SPECIAL_IPV4 = [
    IPv4Network(each)
    for each in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        # Azure's host, which answers to its machines alone. No registry has it.
        "168.63.129.16/32",
        "169.254.0.0/16",
        "172.16.0.0/12",
        # Oracle's metadata among them.
        "192.0.0.0/24",
        "192.0.2.0/24",
        # relays of 6to4
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        # multicast, and all that is reserved
        "224.0.0.0/3",
    )
]
# Only these are assigned to hosts of the public Internet, and some of them have a special purpose too: protocols, among
# them Teredo; documentation; 6to4; documentation.
_GLOBAL_IPV6 = IPv6Network("2000::/3")
_SPECIAL_IPV6 = [IPv6Network(each) for each in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")]
# IPv6 addresses that end with the IPv4 address that they stand for: in the host, in a gateway (NAT64), and long ago.
_EMBEDDING = [IPv6Network(each) for each in ("::ffff:0:0/96", "64:ff9b::/96", "::/96")]
# The 32 bits before the IPv4 address in an address of ISATAP, without the bit that says whether it is unique.
_ISATAP, _ISATAP_MASK = 0x5EFE, 0xFDFFFFFF


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
    """Returns whether the address is public, and so is the IPv4 address in it, if there is one."""
    try:
        found = ip_address(address)
    except ValueError:
        return False
    if isinstance(found, IPv4Address):
        return not any(found in network for network in _SPECIAL_IPV4)
    embedded = str(IPv4Address(int(found) & 0xFFFFFFFF))
    if any(found in network for network in _EMBEDDING):
        return is_public(embedded)
    is_isatap = int(found) >> 32 & _ISATAP_MASK == _ISATAP
    is_special = found not in _GLOBAL_IPV6 or any(found in network for network in _SPECIAL_IPV6)
    return not is_special and (not is_isatap or is_public(embedded))
