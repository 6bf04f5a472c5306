"""Which URLs and which addresses webhooks may have."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import httpcore2
import pytest

from alignedserve.gateway.webhooks.config import SECRET_VARIABLE, WebhookConfig
from alignedserve.gateway.webhooks.network import AddressNotAllowed, PublicNetwork, is_public
from alignedserve.gateway.webhooks.urls import check_url, is_allowed
from tests.gateway.webhooks.receiver import OTHER_SECRET, SECRET, receiving

PREFIXES = ("https://hooks.example.com/team-a", "http://10.1.2.3:8080/")


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com/team-a",
        "https://hooks.example.com/team-a/",
        "https://HOOKS.example.com:443/team-a/x?y=z",
        "http://10.1.2.3:8080",
        "http://10.1.2.3:8080/anything",
        "http://10.1.2.3:8080/100%25;v=1/a%20b",
    ],
)
def test_what_begins_like_an_allowed_one_is_allowed(url: str) -> None:
    assert is_allowed(url, PREFIXES)


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com/team-ab",
        "https://hooks.example.com/",
        "http://hooks.example.com/team-a",
        "https://hooks.example.com.evil.example/team-a",
        "https://hooks.example.com:444/team-a",
        "http://10.1.2.3/",
        "https://evil.example/?https://hooks.example.com/team-a",
    ],
)
def test_what_does_not_is_not(url: str) -> None:
    assert not is_allowed(url, PREFIXES)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hooks.example.com/team-a",
        "ftp://hooks.example.com/team-a",
        "https:///team-a",
        "https://hooks.example.com@evil.example/team-a",
        "https://user:word@hooks.example.com/team-a",
        "https://hooks.example.com/team-a/../team-b",
        "https://hooks.example.com/team-a/%2e%2e/team-b",
        "https://hooks.example.com/team-a/%2fteam-b",
        "https://hooks.example.com/team-a/..%5cteam-b",
        "https://hooks.example.com/team-a/..;/team-b",
        "https://hooks.example.com/team-a/..;a=b/team-b",
        "https://hooks.example.com/team-a/.%2e%3bx/team-b",
        "https://hooks.example.com/team-a/%252e%252e/team-b",
        "https://hooks.example.com/team-a/..%252fteam-b",
        "https://hooks.example.com/team-a/%25252e%25252e/team-b",
        "https://hooks.example.com\\@evil.example/team-a",
        "https://hooks.example.com/team-a#x",
        "https://hooks.example.com:99999/team-a",
        "https://hooks.example.com/team-a\r\nx: y",
        "https://hooks.example.com/team-a b",
        "https://hööks.example.com/",
        "https://[::1/",
        "https://hooks.example.com/team-a/" + "x" * 2048,
    ],
)
def test_what_is_no_plain_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        check_url(url)
    with pytest.raises(ValueError):
        is_allowed(url, PREFIXES)


@pytest.mark.parametrize(
    "address",
    [
        *("1.1.1.1", "93.184.216.34", "192.0.1.1", "172.32.0.1", "223.255.255.255"),
        *("2606:4700::1111", "2a00::5efe:101:101", "2400:cb00::200:5efe:101:101", "2001:200::1"),
        *("::ffff:1.1.1.1", "64:ff9b::101:101", "::1.1.1.1"),
    ],
)
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "0.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("100.64.0.1", "224.0.0.1", "239.1.1.1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00::1", "ff02::1", "fec0::1", "2001:db8::1"),
        # IPv4 in IPv6: mapped, compatible, NAT64, 6to4, Teredo
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1"),
        *("2002:7f00:1::", "2002:a00:1::", "2002:101:101::", "2001:0:7f00:1::"),
        # and ISATAP
        *("2606:4700::5efe:a00:1", "2606:4700::200:5efe:7f00:1", "fe80::5efe:101:101"),
        # metadata of clouds, and what Python's tables have or not, by its version
        *("192.0.0.192", "168.63.129.16", "192.88.99.1", "192.0.0.9", "3fff::1", "2001:20::1", "2001:1::1"),
        *("64:ff9b:1::a00:1", "100::1", "5f00::1", "4000::1", "::ffff:0:10.0.0.1"),
        "not an address",
    ],
)
def test_addresses_that_not_everyone_reaches(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "::1", "::ffff:127.0.0.1", "2130706433", "0x7f.1", "0"]
)
def test_this_machine_is_not_connected_to(host: str) -> None:
    async def scenario() -> None:
        async with receiving() as receiver:
            with pytest.raises(AddressNotAllowed, match="not public"):
                await PublicNetwork().connect_tcp(host, receiver.port, timeout=5)

    asyncio.run(scenario())


def test_with_leave_it_is() -> None:
    async def scenario() -> None:
        async with receiving() as receiver:
            stream = await PublicNetwork(allows_private=True).connect_tcp(
                "localhost", receiver.port, timeout=5
            )
            await stream.aclose()

    asyncio.run(scenario())


def test_a_name_that_leads_elsewhere_later_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that was checked is the one that is connected to; the name is not looked up again."""
    looked_up: list[str] = []
    connected: list[str] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        async def rebinding(host: str, port: int, **_: Any) -> Any:
            looked_up.append(host)
            address = "93.184.216.34" if len(looked_up) == 1 else "127.0.0.1"
            return [(None, None, None, None, (address, port))]

        async def record(_: Any, host: str, *__: Any) -> Any:
            connected.append(host)
            raise httpcore2.ConnectError("nothing is there")

        monkeypatch.setattr(loop, "getaddrinfo", rebinding)
        monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", record)
        network = PublicNetwork()
        with pytest.raises(httpcore2.ConnectError, match="nothing is there"):
            await network.connect_tcp("rebinding.example", 80, timeout=5)
        with pytest.raises(AddressNotAllowed):
            await network.connect_tcp("rebinding.example", 80, timeout=5)

    asyncio.run(scenario())
    assert (looked_up, connected) == (["rebinding.example"] * 2, ["93.184.216.34"])


def test_one_address_of_several_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async def both(host: str, port: int, **_: Any) -> Any:
            return [(None, None, None, None, (address, port)) for address in ("93.184.216.34", "10.0.0.1")]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
        with pytest.raises(AddressNotAllowed):
            await PublicNetwork().connect_tcp("both.example", 80, timeout=5)

    asyncio.run(scenario())


def test_secrets_are_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text(f"# the new one\n{SECRET}\n\n{OTHER_SECRET}\n")
    config = WebhookConfig(("https://a.example/",), secret_file=str(file))
    both = tuple(base64.b64decode(each.removeprefix("whsec_")) for each in (SECRET, OTHER_SECRET))
    assert config.secrets({}) == both
    assert WebhookConfig(("https://a.example/",)).secrets({SECRET_VARIABLE: SECRET}) == both[:1]
    assert WebhookConfig().secrets({}) == ()
    with pytest.raises(ValueError, match="need a webhook_secret_file"):
        WebhookConfig(allowed_urls=("https://a.example/",)).secrets({})
    for bad in ("secret", "whsec_", "whsec_c2hvcnQ=", "whsec_ü", "whsec_" + "c2VjcmV0" * 20):
        with pytest.raises(ValueError, match="24 to 64 bytes") as raised:
            WebhookConfig(("https://a.example/",)).secrets({SECRET_VARIABLE: bad})
        assert bad in ("secret", "whsec_") or bad not in str(raised.value)
    with pytest.raises(ValueError, match="can't be read"):
        WebhookConfig(("https://a.example/",), secret_file=str(tmp_path)).secrets({})
    with pytest.raises(ValueError, match="webhook_url='ftp://a'"):
        WebhookConfig(("ftp://a",))
