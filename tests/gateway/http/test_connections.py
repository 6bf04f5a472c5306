"""What a connection may cost, on real sockets: heads, chunks, bodies that are not wanted, and many connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import select
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import Headers

from alignedserve.gateway import process as gateway_process
from alignedserve.gateway.http import access, connection, reading
from alignedserve.gateway.http.connection import HttpConnection, _Transport
from alignedserve.gateway.http.connections import (
    MAX_PIECES_A_ROUND,
    Connections,
    Doing,
    ReaderQueue,
    allow_descriptors,
    fitting,
)
from alignedserve.gateway.http.framing import Framing
from alignedserve.gateway.http.keys import Keys
from alignedserve.gateway.limits.limits import CallLimits
from tests.gateway.http.test_access import KEYED
from tests.gateway.scripted import ScriptedRouter
from tests.gateway.served import Served, play, served
from tests.store.redis_process import redis_running

CHAT = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


@asynccontextmanager
async def connected(at: Served, said: bytes = b"") -> AsyncIterator[tuple[asyncio.StreamReader, Any]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", at.http.base_url.port)
    writer.write(said)
    try:
        yield reader, writer
    finally:
        writer.close()


async def talk(at: Served, said: bytes) -> bytes:
    """All that comes back, until the connection is closed."""
    async with connected(at, said) as (reader, _):
        return await reader.read()


async def status(reader: asyncio.StreamReader) -> int:
    """Of the next answer, which is read to its end."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = re.search("content-length: ([0-9]+)", head)
    await reader.readexactly(int(length[1]) if length else 0)
    return int(head.split()[1])


async def is_over(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What has been read of all requests."""
    found: list[bytes] = []
    take = Framing.take

    def noting(self: Framing, arrived: bytearray) -> bytes:
        piece = take(self, arrived)
        found.append(piece)
        return piece

    monkeypatch.setattr(Framing, "take", noting)
    return found


# ---- what is no request ----


def test_what_is_no_request_is_told_so_in_openais_words_and_the_connection_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with served() as at:
            for said, code in (
                (CHAT + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
                (CHAT + "X: " + "a" * 100_000, 431),
                ("GET / HTTP/1.1\r\n" + "a: b\r\n" * 1000, 431),
                ("GET / HTTP/1.1\r\nHost: localhost\r\nX:" + " " * 8000 + "\x01\r\n\r\n", 400),
                (CHAT + "Transfer-Encoding: chunked\r\n\r\n" + "1\r\n \r\n" * 10_000, 400),
                (CHAT + "Transfer-Encoding: chunked\r\n\r\n1;" + " " * 200 + "\n\r\n", 400),
                (CHAT + "Transfer-Encoding: gzip\r\n\r\n", 501),
                ("GET / HTTP/3.0\r\nHost: localhost\r\n\r\n", 505),
                ("\x16\x03\x01\x02", 400),
            ):
                got = await talk(at, said.encode() + GET)
                assert (
                    got.startswith(b"HTTP/1.1 %d " % code) and len(re.findall(rb"HTTP/1.1 [0-9]", got)) == 1
                ), said[:100]
                assert b"\r\nConnection: close\r\n" in got and b'{"error":{"message":' in got
            assert at.router.submitted == [] and await at.http.get("/v1/models")
            await at.process.ending.drain_state.until_idle()

    play(scenario)
    # who sends such things does not fill the log
    levels = {record.levelno for record in caplog.records if not record.name.startswith("asyncio")}
    assert not levels & {logging.WARNING, logging.ERROR}


def test_other_protocols_are_not_spoken() -> None:
    async def scenario() -> None:
        async with served() as at:
            key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
            for upgrade in (f"websocket\r\n{key}", "h2c\r\nHTTP2-Settings: \r\n"):
                head = (
                    f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: {upgrade}"
                )
                async with connected(at, f"{head}\r\n".encode()) as (reader, _):
                    assert await status(reader) == 200

    play(scenario)


@pytest.mark.slow
def test_requests_that_wait_are_answered_in_their_order_and_wait_outside(read: list[bytes]) -> None:
    async def scenario() -> None:
        async with served() as at:
            body = b'{"prompt": "x"}'
            first = CHAT.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
            at.router.allow(0)
            async with connected(at, first + GET * 5000) as (reader, _):
                await at.router.until(lambda: len(at.router.submitted) == 1)
                assert b"".join(read) == first
                at.router.allow(None)
                assert [await status(reader) for _ in range(101)] == [200] * 101

    play(scenario)


# ---- bodies ----


@pytest.mark.slow
@pytest.mark.parametrize("framed", ["Content-Length: 900000000", "Transfer-Encoding: chunked"])
def test_who_has_no_key_is_not_listened_to(framed: str, read: list[bytes]) -> None:
    async def scenario() -> None:
        async with served(**KEYED) as at:
            head = f"{CHAT}{framed}\r\n\r\n".encode()
            async with connected(at, head) as (reader, writer):
                answer = await reader.readuntil(b"\r\n\r\n")
                assert b" 401 " in answer and b"connection: close" in answer.lower()
                # and soon his system says that nobody is there
                with pytest.raises(ConnectionError):
                    while True:
                        writer.write(b"1\r\n \r\n" * 10_000)
                        await writer.drain()
            assert [piece for piece in read if piece] == [head]

    play(scenario)


@pytest.mark.slow
def test_who_sends_a_large_body_hears_why_it_is_refused() -> None:
    async def scenario() -> None:
        async with served(**KEYED) as at:
            body = {"prompt": "x" * 4_000_000}
            assert (await at.http.post("/v1/completions", json=body)).status_code == 401

    play(scenario)


@pytest.mark.slow
def test_a_connection_outlives_a_small_body_that_nobody_wants() -> None:
    async def scenario() -> None:
        async with served(**KEYED) as at:
            for path, key, code in (
                ("/v1/completions", "wrong", 401),
                ("/nothing", "secret", 404),
                ("/v1/models", "secret", 405),
            ):
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
                said = f"{head}Content-Length: 30000\r\n\r\n".encode() + b"x" * 30_000
                async with connected(at, said + said) as (reader, _):
                    assert [await status(reader) for _ in range(2)] == [code] * 2
                # but not a large one
                async with connected(at, f"{head}Content-Length: 3000000\r\n\r\n".encode()) as (reader, _):
                    assert await status(reader) == code and await is_over(reader)

    play(scenario)


SMALL = CallLimits(max_body_bytes=200_000, max_total_body_bytes=400_000)


async def begun(at: Served, num_bytes: int, key: str = "none") -> tuple[asyncio.StreamReader, Any]:
    """A body of which the last piece does not come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", at.http.base_url.port)
    head = f"{CHAT}Authorization: Bearer {key}\r\nContent-Length: {num_bytes + 1}\r\n\r\n"
    writer.write(head.encode() + b" " * num_bytes)
    return reader, writer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "num_held"), [({}, 2), (KEYED, 1)], ids=["no keys", "half for each key"]
)
def test_bodies_in_memory_have_a_total(
    settings: dict[str, Any], num_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories: list[reading.BodyMemory] = []

    def kept(limits: CallLimits, keys: Keys) -> reading.BodyMemory:
        memories.append(access.body_memory(limits, keys))
        return memories[-1]

    monkeypatch.setattr(gateway_process, "body_memory", kept)

    async def scenario() -> None:
        async with served(limits=SMALL, **settings) as at:
            held = [await begun(at, 199_000, "secret") for _ in range(num_held + 2)]
            refused = [asyncio.create_task(status(reader)) for reader, _ in held]
            while sum(task.done() for task in refused) < 2:
                await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(0)
            assert [task.result() for task in refused if task.done()] == [503] * 2
            # The others may not have been read to their last byte yet.
            while memories[-1].num_bytes < num_held * 199_000:
                await asyncio.sleep(0)
            # a small one is taken, and one of somebody else
            for key, num_bytes, code in (
                ("secret", 60_000, 200),
                ("secret", 190_000, 503),
                ("other", 190_000, 200 if settings else 503),
            ):
                answer = await at.http.post(
                    "/v1/completions",
                    json={"prompt": "x", "user": "u" * num_bytes},
                    headers={"Authorization": f"Bearer {key}"},
                )
                assert answer.status_code == code, (key, num_bytes)
                if code == 503:
                    assert answer.headers["retry-after"] == "1"
            for task, (_, writer) in zip(refused, held, strict=True):
                task.cancel()
                writer.close()
            await at.process.ending.drain_state.until_idle()
            large = {"prompt": "x", "user": "u" * 190_000}
            headers = {"Authorization": "Bearer secret"}
            assert (await at.http.post("/v1/completions", json=large, headers=headers)).status_code == 200

    play(scenario)


def test_a_total_has_room_for_two_bodies() -> None:
    with pytest.raises(ValueError, match="max_total_body_bytes=300: must be at least twice"):
        CallLimits(max_body_bytes=200, max_total_body_bytes=300)


@pytest.mark.slow
def test_files_need_no_room_beyond_a_chunk() -> None:
    async def scenario() -> None:
        limits = CallLimits(max_body_bytes=1 << 20, max_total_body_bytes=2 << 20)
        async with redis_running() as redis, served(store_url=redis.url, limits=limits) as at:
            sent = await at.client.files.create(file=("x", b"x" * (5 << 20)), purpose="batch")
            assert sent.bytes == 5 << 20

    play(scenario)


@pytest.mark.slow
def test_a_body_has_a_least_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "GRACE_S", 0.3)

    async def scenario() -> None:
        head = f"{CHAT}Content-Length: 9000\r\n\r\n".encode()
        async with served() as at, connected(at, head) as (reader, writer):
            answering = asyncio.create_task(status(reader))
            while not answering.done():
                writer.write(b" ")
                await asyncio.sleep(0.02)
            assert await answering == 408 and await is_over(reader)

    play(scenario)


def test_what_the_server_takes_its_time_for_is_not_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(reading, "time", clock)

    async def scenario() -> None:
        messages = [{"type": "http.request", "body": b"x", "more_body": more} for more in (True, True, False)]

        async def receive() -> Any:
            await asyncio.sleep(0)
            return messages.pop(0)

        with reading.BodyMemory(1000).share("a") as share:
            headers = Headers({"transfer-encoding": "chunked"})
            body = reading.BodyReading(receive, headers, share, 1000, 1000)
            while messages:
                await body.receive()
                clock.now += reading.GRACE_S
            assert share.num_bytes == 3

    play(scenario)


# ---- many connections ----


class Fake:
    def __init__(self) -> None:
        self.is_open = True

    def abort(self) -> None:
        self.is_open = False


def test_who_has_been_idle_longest_makes_room_and_who_is_answered_never() -> None:
    crowd = Connections(4)
    kept = [Fake() for _ in range(4)]
    for each in kept:
        assert crowd.begin(each, "a")
        crowd.note(each, Doing.IDLE)
    crowd.note(kept[0], Doing.BUSY)
    crowd.note(kept[1], Doing.STALLED)
    # it has asked something in between
    crowd.note(kept[2], Doing.BUSY)
    crowd.note(kept[2], Doing.IDLE)
    gone = []
    for _ in range(3):
        new = Fake()
        assert crowd.begin(new, "a")
        gone.append([each.is_open for each in kept])
    assert gone == [
        [True, True, True, False],
        [True, True, False, False],
        [True, False, False, False],
    ]
    assert not crowd.begin(Fake(), "a") and len(crowd) == 4
    crowd.end(kept[0])
    crowd.end(kept[0])
    assert crowd.begin(Fake(), "a") and len(crowd) == 4


@pytest.mark.slow
def test_many_that_say_nothing_lock_nobody_out() -> None:
    async def scenario() -> None:
        router = ScriptedRouter()
        async with served(router, limits=CallLimits(max_connections=8)) as at:
            router.allow(1)
            stream = await at.client.completions.create(model="demo", prompt="x", max_tokens=9, stream=True)
            await anext(stream)
            kept = [await asyncio.open_connection("127.0.0.1", at.http.base_url.port) for _ in range(100)]
            kept[0][1].write(b"GET / HTTP/1.1\r\n")
            assert (await at.http.get("/v1/models")).status_code == 200
            # all but seven have gone, and none that was answered
            await asyncio.gather(*(is_over(reader) for reader, _ in kept[:92]))
            router.allow(None)
            assert [chunk async for chunk in stream]
            for _, writer in kept:
                writer.close()

    play(scenario)


@pytest.mark.slow
def test_when_all_are_answered_the_next_one_is_told_so() -> None:
    async def scenario() -> None:
        async with served(limits=CallLimits(max_connections=2)) as at:
            at.router.allow(0)
            asking = [asyncio.create_task(at.post("/v1/completions", {"prompt": "x"})) for _ in range(2)]
            await at.router.until(lambda: len(at.router.submitted) == 2)
            got = await talk(at, b"")
            assert got.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: 1\r\n" in got
            at.router.allow(None)
            assert [(await each).status_code for each in asking] == [200, 200]

    play(scenario)


def test_there_are_no_more_connections_than_file_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
        assert fitting(8192) == 300 and fitting(200) == 200
        allow_descriptors(600)
        assert fitting(600) == 600
        allow_descriptors(10)
        assert fitting(600) == 600
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_whoever_is_answered_for_the_last_time_may_go_on_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    """His system would drop the answer if this one closed the connection then."""
    monkeypatch.setattr(connection, "LINGER_S", 60.0)

    async def scenario() -> None:
        async with served() as at:
            last = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            async with connected(at, last + GET) as (reader, writer):
                assert await status(reader) == 200 and await is_over(reader)
                poll = select.poll()
                # Errors are reported without being asked for.
                poll.register(writer.get_extra_info("socket"), 0)
                for _ in range(3):
                    writer.write(b"x")
                    assert (await at.http.get("/v1/models")).status_code == 200
                    assert not poll.poll(0)

    play(scenario)


# ---- downloads ----


@pytest.mark.slow
def test_a_file_that_is_deleted_meanwhile_is_a_broken_download(caplog: pytest.LogCaptureFixture) -> None:
    size = 24 << 20

    async def scenario() -> None:
        async with redis_running() as redis, served(store_url=redis.url) as at:
            sent = await at.client.files.create(file=("x", os.urandom(size)), purpose="batch")
            narrow = socket.socket()
            narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            narrow.setblocking(False)
            loop = asyncio.get_running_loop()
            with narrow:
                await loop.sock_connect(narrow, ("127.0.0.1", at.http.base_url.port))
                asked = f"GET /v1/files/{sent.id}/content HTTP/1.1\r\nHost: localhost\r\n\r\n"
                await loop.sock_sendall(narrow, asked.encode())
                assert (await loop.sock_recv(narrow, 12)).endswith(b"200")
                await at.client.files.delete(sent.id)
                num_bytes = 0
                with contextlib.suppress(ConnectionError):
                    while piece := await loop.sock_recv(narrow, 1 << 20):
                        num_bytes += len(piece)
            assert num_bytes < size
            await at.process.ending.drain_state.until_idle()

    play(scenario)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["broken off: the file was deleted meanwhile"]


def test_the_protocol_does_not_depend_on_what_is_installed() -> None:
    assert [each.__module__ for each in HttpConnection.__mro__ if "uvicorn" in each.__module__] == [
        "uvicorn.protocols.http.h11_impl"
    ]


# ---- much at once ----


class Turn:
    def __init__(self, name: int, went_on: list[int]) -> None:
        self._name = name
        self._went_on = went_on

    def read_on(self) -> None:
        self._went_on.append(self._name)


def test_a_round_of_the_event_loop_reads_some_of_those_who_send_much() -> None:
    async def scenario() -> None:
        reads, went_on = ReaderQueue(), list[int]()
        turns = [Turn(name, went_on) for name in range(3 * MAX_PIECES_A_ROUND + 1)]
        for turn in turns:
            reads.wait(turn)
        reads.leave(turns[1])
        reads.leave(turns[1])
        expected = [name for name in range(len(turns)) if name != 1]
        for num_rounds in range(1, 5):
            await asyncio.sleep(0)
            assert went_on == expected[: num_rounds * MAX_PIECES_A_ROUND]
        # and again, behind the others
        reads.wait(turns[0])
        reads.wait(turns[1])
        await asyncio.sleep(0)
        assert went_on == [*expected, 0, 1]

    asyncio.run(scenario())


def test_a_connection_is_read_when_it_is_its_turn_and_there_is_room() -> None:
    reads: list[str] = []
    inner = SimpleNamespace(
        pause_reading=lambda: reads.append("pause"), resume_reading=lambda: reads.append("resume")
    )
    transport = _Transport(inner, SimpleNamespace())  # type: ignore[arg-type]
    transport.await_turn()
    transport.resume_reading()
    assert reads == ["pause"]
    transport.pause_reading()
    transport.read_on()
    assert reads == ["pause", "pause"]
    transport.resume_reading()
    transport.await_turn()
    transport.read_on()
    assert reads == ["pause", "pause", "resume", "pause", "resume"]


@pytest.mark.slow
def test_bodies_that_come_at_once_come_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their connections wait for their turns, and for who takes what has come, each in any order."""
    waits: list[object] = []
    wait = ReaderQueue.wait

    def counted(reads: ReaderQueue, reader: Any) -> None:
        waits.append(reader)
        wait(reads, reader)

    monkeypatch.setattr(ReaderQueue, "wait", counted)

    async def scenario() -> None:
        async with served(limits=CallLimits(max_body_bytes=2 << 20)) as at:
            texts = ["ab " * 200_000 + str(number) for number in range(12)]
            bodies = [{"prompt": "a", "user": text} for text in texts]
            answers = await asyncio.gather(*(at.post("/v1/completions", body) for body in bodies))
            assert {answer.status_code for answer in answers} == {200}
            assert waits

    play(scenario)


def test_no_more_descriptors_are_allowed_than_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this system allows any number")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
        allow_descriptors(2 * hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
