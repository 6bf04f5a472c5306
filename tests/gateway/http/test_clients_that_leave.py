"""Clients that hang up, close half of their connection, or open many connections. They cost others nothing.

Sockets here block, so all that they send has arrived before the server, which runs in the same thread, reads any of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any

import pytest

from alignedserve.gateway.generation.endpoint import Result
from alignedserve.gateway.generation.preparer import ReceivedBody
from alignedserve.gateway.http.connection import HttpConnection
from alignedserve.gateway.http.connections import (
    MAX_BEGUN_AT_ONCE,
    Connections,
    Doing,
    _Held,
    holder_at,
)
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.process import GatewayProcess
from alignedserve.vopr.front_end.preparer_in_place import PreparerInPlace
from tests.gateway.http.test_access import KEYED
from tests.gateway.http.test_connections import Fake
from tests.gateway.served import Served, play, served

BODY = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 2}).encode()


def call(
    key: str = "secret", version: str = "1.1", body: bytes = BODY, path: str = "/v1/completions"
) -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def connected(at: Served, said: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", at.http.base_url.port or 0), 20) as sock:
        sock.sendall(said)
        yield sock


async def received(sock: socket.socket) -> bytes:
    """Returns what arrives until the connection is closed."""
    sock.setblocking(False)
    pieces = []
    while piece := await asyncio.get_running_loop().sock_recv(sock, 65536):
        pieces.append(piece)
    return b"".join(pieces)


# ---- clients that have gone ----


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_nothing_is_prepared_or_submitted_for_clients_that_have_gone(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with served(**KEYED) as at:
            for _ in range(60):
                with connected(at, call(version=version)):
                    pass
            at.client.api_key = "secret"
            assert (await at.client.completions.create(model="demo", prompt="y")).choices
            assert len(at.router.submitted) == 1

    play(scenario)
    assert [record.getMessage() for record in caplog.records].count("answered") == 1


def test_a_client_that_leaves_while_it_waits_is_noticed() -> None:
    async def scenario() -> None:
        async with served(**KEYED) as at:
            at.router.allow(0)
            with connected(at, call()):
                await at.router.until(lambda: len(at.router.submitted) == 1)
            await at.process.ending.drain_state.until_idle()
            await at.router.until(lambda: at.router.aborted != [])

    play(scenario)


class NeverReady(PreparerInPlace):
    begun: asyncio.Event

    async def made(self, body: ReceivedBody, num_added: int = 0) -> Result:
        self.begun.set()
        await asyncio.Event().wait()
        raise AssertionError


class Unready(GatewayProcess):
    preparer_class = NeverReady


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/responses/input_tokens",
        "/invocations",
    ],
)
def test_a_client_that_leaves_while_its_body_is_read_is_noticed(path: str) -> None:
    async def scenario() -> None:
        NeverReady.begun = asyncio.Event()
        async with served(kind=Unready, **KEYED) as at, asyncio.timeout(20):
            with connected(at, call(path=path)):
                await NeverReady.begun.wait()
            await at.process.ending.drain_state.until_idle()

    play(scenario)


def test_a_client_that_leaves_between_events_is_noticed() -> None:
    async def scenario() -> None:
        async with served(**KEYED) as at:
            at.router.allow(1)
            with connected(at, call(body=BODY[:-1] + b', "stream": true}')) as sock:
                sock.setblocking(False)
                while b"data: " not in await asyncio.get_running_loop().sock_recv(sock, 65536):
                    pass
            async with asyncio.timeout(20):
                await at.router.until(lambda: at.router.aborted != [])
                await at.process.ending.drain_state.until_idle()

    play(scenario)


def test_a_request_that_waits_while_the_server_stops_begins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_begun: Counter[HttpConnection] = Counter()
    begin, await_turn = HttpConnection._begin, HttpConnection._await_turn

    def noted_begin(self: HttpConnection) -> None:
        num_begun[self] += 1
        begin(self)

    def stopping(self: HttpConnection) -> None:
        await_turn(self)
        if self._awaits_turn:
            self.shutdown()

    monkeypatch.setattr(HttpConnection, "_begin", noted_begin)
    monkeypatch.setattr(HttpConnection, "_await_turn", stopping)

    async def scenario() -> None:
        async with served(**KEYED) as at, AsyncExitStack() as stack:
            socks = [stack.enter_context(connected(at, call())) for _ in range(12)]
            for sock in socks[MAX_BEGUN_AT_ONCE:]:
                assert (await received(sock)).startswith(b"HTTP/1.1 200 ")

    play(scenario)
    assert list(num_begun.values()) == [1] * 12


# ---- clients that close half of their connection ----


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("is_early", [True, False])
def test_a_client_that_has_said_all_gets_its_answers(num_calls: int, is_early: bool) -> None:
    async def scenario() -> None:
        async with served(**KEYED) as at:
            at.router.allow(0)
            with connected(at, call() * num_calls) as sock:
                if not is_early:
                    await at.router.until(lambda: at.router.submitted != [])
                sock.shutdown(socket.SHUT_WR)
                await at.router.until(lambda: at.router.submitted != [])
                at.router.allow(None)
                got = await received(sock)
            assert got.count(b"HTTP/1.1 200 ") == num_calls and got.count(b'"text"') == num_calls
            assert got.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").count(b"HTTP/1.1 ") == num_calls

    play(scenario)


@pytest.mark.parametrize("said", [call()[:-1], call()[:30], b"", call() + b"GET / HT"])
def test_half_of_a_request_gets_no_answer_and_the_connection_ends(said: bytes) -> None:
    async def scenario() -> None:
        async with served(**KEYED) as at:
            with connected(at, said) as sock:
                sock.shutdown(socket.SHUT_WR)
                got = await received(sock)
            assert got.count(b"HTTP/1.1 200 ") == said.count(BODY)
            await at.process.ending.drain_state.until_idle()

    play(scenario)


def test_a_large_answer_arrives_whole_whatever_follows_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made = HttpConnection.connection_made

    def with_small_buffer(self: HttpConnection, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(HttpConnection, "connection_made", with_small_buffer)

    async def scenario() -> None:
        async with served(**KEYED) as at:
            head = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n\r\n"
            with socket.socket() as sock:
                # Most of the answer waits in the server.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect(("127.0.0.1", at.http.base_url.port or 0))
                at.router.allow(0)
                sock.sendall(call() + head + b"GET / HT")
                sock.shutdown(socket.SHUT_WR)
                await at.router.until(lambda: at.router.submitted != [])
                at.router.allow(None)
                told, _, body = (await received(sock)).rpartition(b"\r\n\r\n")
            assert b"content-length: %d\r\n" % len(body) in told + b"\r\n"

    play(scenario)


# ---- whose connection is closed ----


def begun(crowd: Connections, address: str, *doings: Doing) -> list[Fake]:
    found = [Fake() for _ in doings]
    for each, doing in zip(found, doings, strict=True):
        assert crowd.begin(each, address)
        crowd.note(each, doing)
    return found


def test_room_is_taken_from_whoever_has_most() -> None:
    crowd = Connections(6)
    first = begun(crowd, "a", Doing.IDLE)
    others = begun(crowd, "b", Doing.BUSY, Doing.STALLED, Doing.IDLE)
    both = begun(crowd, "c", Doing.IDLE, Doing.STALLED)
    gone = []
    for _ in range(5):
        assert crowd.begin(Fake(), "new")
        gone.append([each.is_open for each in (*first, *others, *both)])
    assert gone[0] == [True, True, True, False, True, True]
    # two, two and one: the one that has had two for longest
    assert gone[1] == [True, True, True, False, False, True]
    assert gone[-1] == [False, True, False, False, False, False]
    assert not crowd.begin(Fake(), "new") and len(crowd) == 6


def test_connections_belong_to_the_owner_of_the_key_that_they_have_shown() -> None:
    """Those of a proxy have one address."""
    crowd = Connections(8, max_of_address=4)
    many = begun(crowd, "proxy", *[Doing.IDLE] * 4)
    for each in many:
        crowd.hold(each, "key:a")
    other = begun(crowd, "proxy", Doing.IDLE)[0]
    crowd.hold(other, "key:b")
    begun(crowd, "proxy", *[Doing.BUSY] * 3)
    assert crowd.begin(Fake(), "proxy") and not many[0].is_open and other.is_open
    # strangers behind it have no more than their share
    assert not crowd.begin(Fake(), "proxy") and many[1].is_open
    assert crowd.begin(Fake(), "elsewhere") and not many[1].is_open and other.is_open
    for each in (*many, other):
        crowd.end(each)
        crowd.hold(each, "key:a")
        crowd.note(each, Doing.IDLE)
    assert len(crowd) == 5


def test_strangers_with_many_addresses_make_room_before_a_key_does() -> None:
    crowd = Connections(6, max_of_address=3)
    known = begun(crowd, "a", *[Doing.IDLE] * 3)
    for each in known:
        crowd.hold(each, "key:a")
    strangers = [begun(crowd, address, Doing.IDLE)[0] for address in "bcd"]
    for number in range(3):
        assert crowd.begin(Fake(), f"new {number}")
    assert all(each.is_open for each in known) and not any(each.is_open for each in strangers)
    # Those that came last can't be closed yet.
    assert crowd.begin(Fake(), "another") and not known[0].is_open


def test_a_key_with_most_connections_makes_room_before_a_stranger_does() -> None:
    crowd = Connections(4, max_of_address=2)
    many = begun(crowd, "a", Doing.IDLE)
    crowd.hold(many[0], "key:a")
    for _ in range(2):
        many += begun(crowd, "a", Doing.IDLE)
        crowd.hold(many[-1], "key:a")
    stranger = begun(crowd, "b", Doing.IDLE)[0]
    assert crowd.begin(Fake(), "c") and not many[0].is_open and stranger.is_open


def test_whose_connection_is_closed_is_found_without_a_look_at_all_holders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[_Held] = []
    next_closed: Any = vars(_Held)["next_closed"]

    def noted(held: _Held) -> object:
        looked_at.append(held)
        return next_closed.fget(held)

    monkeypatch.setattr(_Held, "next_closed", property(noted))
    crowd, num_holders = Connections(1000), 1000
    for number in range(num_holders):
        begun(crowd, str(number), Doing.IDLE)
    looked_at.clear()
    assert crowd.begin(Fake(), "new")
    assert len(looked_at) < 10 and len(crowd) == num_holders


def test_a_network_of_ipv6_is_one_holder() -> None:
    assert holder_at("2001:db8::1") == holder_at("2001:db8:0:0:ffff::2") != holder_at("2001:db8:0:1::1")
    assert holder_at("fe80::1%eth0") == holder_at("fe80::2")
    assert holder_at("192.0.2.1") != holder_at("192.0.2.2")


def test_a_request_that_has_arrived_is_not_closed_for_newer_connections() -> None:
    async def scenario() -> None:
        async with served(limits=CallLimits(max_connections=16), **KEYED) as at:
            with ExitStack() as stack:
                first = [stack.enter_context(connected(at, call())) for _ in range(8)]
                for _ in range(50):
                    stack.enter_context(connected(at))
                for each in first:
                    each.setblocking(False)
                    assert (await asyncio.get_running_loop().sock_recv(each, 12)).endswith(b"200")

    play(scenario)


def test_keys_take_turns_with_strangers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with served(**KEYED) as at:
            with ExitStack() as stack:
                for _ in range(50):
                    stack.enter_context(connected(at, call("unknown")))
                known = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n\r\n"
                last = stack.enter_context(connected(at, known))
                last.setblocking(False)
                assert (await asyncio.get_running_loop().sock_recv(last, 12)).endswith(b"200")

    play(scenario)
    statuses = [record.fields["status"] for record in caplog.records if hasattr(record, "fields")]
    assert statuses.index(200) < 20


# ---- bodies that a client holds back ----


@pytest.mark.parametrize(("key", "num_interim"), [("wrong", 0), ("secret", 1)])
def test_a_body_is_asked_for_only_with_a_key(key: str, num_interim: int) -> None:
    async def scenario() -> None:
        async with served(**KEYED) as at:
            head, body = call(key).split(b"\r\n\r\n")
            with connected(at, head + b"\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n") as sock:
                loop = asyncio.get_running_loop()
                sock.setblocking(False)
                first = await loop.sock_recv(sock, 65536)
                assert first.startswith(b"HTTP/1.1 100 " if num_interim else b"HTTP/1.1 401 ")
                if num_interim:
                    await loop.sock_sendall(sock, body)
                got = first + await received(sock)
            assert got.count(b"HTTP/1.1 100 ") == num_interim
            assert b"HTTP/1.1 200 " in got or b"connection: close" in got.lower()

    play(scenario)
