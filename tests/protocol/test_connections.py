"""Frames, and both ends of a connection on real sockets."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import select
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import alignedserve
from alignedserve.protocol import connection as connection_module
from alignedserve.protocol import hub as hub_module
from alignedserve.protocol import peer as peer_module
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.connection import NUM_PINGS, RefusedByRouter, RouterConnection
from alignedserve.protocol.frames import MAX_FRAME_BYTES, FrameReader, WireError, frame
from alignedserve.protocol.handshake import (
    DIGEST_BYTES,
    NONCE_BYTES,
    ClientHandshake,
    HandshakeError,
    ServerHandshake,
    digest_of,
)
from alignedserve.protocol.host import LiveHost, Timer
from alignedserve.protocol.hub import Hub
from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    Hello,
    InstanceLimits,
    NewTokens,
    Ping,
    Refused,
    Release,
    Request,
    Stop,
    Submit,
    Tokens,
    Welcome,
)
from alignedserve.protocol.peer import Peer
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import Epoch, InstanceId, RequestKey
from tests.playing import play

TOKEN = "right"
MEMBERS = {InstanceId("decode-0"): "decode", InstanceId("prefill-0"): "prefill"}
KEY = RequestKey(2**63 - 1)
PARAMS = SamplingParams(
    temperature=1.0,
    stop=["a", "b"],
    logit_bias={3: 1.5},
    bad_word_ids=[[1, 2]],
    allowed_token_ids=[5],
    seed=7,
    max_tokens=None,
)
SUBMIT = Submit(Request(KEY, [1, 2, 3], PARAMS, seed=2**64 - 1, arrival_s=1.5), delivered=[4])
MESSAGES: list[AnyMessage] = [
    SUBMIT,
    Abort([KEY]),
    Tokens([NewTokens(KEY, 0, [5], logprobs=[[-0.5, 1, {5: -0.5}]], finish_reason="stop")]),
    Release([KEY, RequestKey(1)]),
]


def hello(
    name: str = "decode-0",
    epoch: int = 1,
    role: str = "decode",
    fingerprint: dict[str, str] | None = None,
    version: str = alignedserve.__version__,
) -> Hello:
    limits = InstanceLimits()
    return Hello(
        role, InstanceId(name), Epoch(epoch), os.getpid(), fingerprint or {}, limits, version=version
    )


# ---- frames ----


@given(st.lists(st.integers(1, 200)))
def test_messages_come_out_as_they_went_in_however_the_stream_is_cut(cuts: list[int]) -> None:
    stream, reader, found = b"".join(map(frame, MESSAGES)), FrameReader(), []
    start = 0
    for cut in [*cuts, len(stream)]:
        found += list(reader.feed(stream[start : start + cut]))
        start += cut
    assert [frame(message) for message in found] == [frame(message) for message in MESSAGES]
    assert isinstance(found[0], Submit) and found[0].request.params == PARAMS


@pytest.mark.parametrize(
    ("garbage", "complaint"),
    [
        (b"\0\0\0\x01\xc1", "a frame of 1 bytes is not a message"),
        (b"GET / HTTP/1.1\r\n\r\n", f"at most {MAX_FRAME_BYTES} are allowed"),
        (b"\0\0\0\0", "a frame of 0 bytes is not a message"),
        (frame(SUBMIT)[:4] + frame(SUBMIT)[4:].replace(b"Submit", b"Sabmit"), "Sabmit"),
        # what our own types refuse is refused here too
        (
            frame(SUBMIT).replace(b"\xabtemperature\xcb\x3f", b"\xabtemperature\xcb\xbf"),
            "temperature=-1.0: must be",
        ),
    ],
)
def test_what_is_no_message_is_an_error_after_those_before_it(garbage: bytes, complaint: str) -> None:
    feeding = FrameReader().feed(frame(Abort([KEY])) + garbage)
    assert next(feeding) == Abort([KEY])
    with pytest.raises(WireError, match=complaint):
        next(feeding)


def test_a_message_too_long_for_a_frame_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.protocol.frames.MAX_FRAME_BYTES", 100)
    with pytest.raises(WireError, match=r"Release of \d+ bytes: a message has at most 100"):
        frame(Release([KEY] * 100))


# ---- both ends ----


class Heard:
    """A hub's handler that writes down what it hears, welcomes, and can be waited for."""

    def __init__(self, epoch: int = 1, silence_s: float = 0.0) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.hub = Hub(TOKEN, self)
        self._epoch = Epoch(epoch)
        self._silence_s = silence_s
        self._changed = asyncio.Event()

    def connected(self, hello: Hello) -> None:
        self.hub.send(hello.instance_id, Welcome(self._epoch, self._silence_s))
        self._note("connected", hello.instance_id, hello.epoch)

    def received(self, hello: Hello, message: AnyMessage) -> None:
        self._note("received", hello.instance_id, message)

    def closed(self, instance_id: InstanceId, epoch: Epoch) -> None:
        self._note("closed", instance_id, epoch)

    async def until(self, *events: tuple[Any, ...]) -> None:
        while self.events[-len(events) :] != list(events):
            self._changed.clear()
            await self._changed.wait()

    def _note(self, *event: Any) -> None:
        self.events.append(event)
        self._changed.set()


class Told:
    """A connection's handler, likewise."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._changed = asyncio.Event()

    def on_up(self, welcome: Welcome) -> None:
        self._note(("up", welcome.router_epoch))

    def on_message(self, message: AnyMessage) -> None:
        if message == Abort([RequestKey(13)]):
            raise RuntimeError("unlucky")
        self._note(message)

    def on_down(self) -> None:
        self._note("down")

    async def until(self, *events: Any) -> None:
        while self.events != list(events):
            self._changed.clear()
            await self._changed.wait()

    def _note(self, event: Any) -> None:
        self.events.append(event)
        self._changed.set()


@asynccontextmanager
async def connected(
    port: int, hello: Hello, token: str = TOKEN, path: str | None = None
) -> AsyncIterator[tuple[RouterConnection, Told]]:
    told = Told()
    connection = RouterConnection(RouterAddress("127.0.0.1", port, token, path), lambda: hello, told)
    running = asyncio.create_task(connection.run())
    yield connection, told
    connection.stop()
    await running


def test_events_and_orders_arrive_in_order_and_the_close_is_told() -> None:
    async def scenario() -> None:
        heard = Heard()
        port = await heard.hub.listen("127.0.0.1", 0)
        async with connected(port, hello()) as (connection, told):
            await told.until(("up", 1))
            for message in MESSAGES:
                connection.send(message)
            await heard.until(*[("received", "decode-0", message) for message in MESSAGES])
            for message in MESSAGES:
                heard.hub.send(InstanceId("decode-0"), message)
            await told.until(("up", 1), *MESSAGES)
        await heard.until(("closed", "decode-0", 1))
        assert told.events[-1] == "down" and heard.events[0] == ("connected", "decode-0", 1)
        heard.hub.close()

    play(scenario)


@pytest.mark.parametrize(
    ("newcomer", "reason"),
    [
        (hello("decode-1", role="king"), "role='king': must be one of kvpool, prefill, decode"),
        (hello("decode-9"), "decode-9: there is no decode with this name here"),
        (hello("prefill-0", role="launcher"), "prefill-0: there is no launcher with this name here"),
        (hello("decode-0", epoch=4), "decode-0: epoch 4 is over, 5 is connected"),
        (
            hello("prefill-0", role="prefill", fingerprint={"dtype": "bfloat16", "only here": "x"}),
            "prefill-0: dtype is bfloat16, but float32 at decode-0",
        ),
        (
            hello("prefill-0", role="prefill", version="0.0.9"),
            r"prefill-0: is version 0.0.9, and this process 0.1.0; versions work together if they differ only in",
        ),
        (hello("prefill-0", role="prefill", version="0.2.0"), "is version 0.2.0, and this process 0.1.0"),
        (hello("prefill-0", role="prefill", version=""), "is version , and this process 0.1.0"),
    ],
)
def test_who_does_not_belong_is_refused_with_the_reason(newcomer: Hello, reason: str) -> None:
    async def scenario() -> None:
        heard = Heard()
        heard.hub = Hub(TOKEN, heard, members=MEMBERS)
        port = await heard.hub.listen("127.0.0.1", 0)
        # one of the version before or after is taken in
        first = hello(epoch=5, fingerprint={"dtype": "float32"}, version="0.1.1")
        async with connected(port, first) as (_, told):
            await told.until(("up", 1))
            refused = RouterConnection(RouterAddress("127.0.0.1", port, TOKEN), lambda: newcomer, Told())
            with pytest.raises(RefusedByRouter, match=reason):
                await refused.run()
            assert heard.events == [("connected", "decode-0", 5)]
        heard.hub.close()

    play(scenario)


def test_a_difference_to_who_is_gone_does_not_count() -> None:
    async def scenario() -> None:
        heard = Heard()
        port = await heard.hub.listen("127.0.0.1", 0)
        for dtype in ("float32", "bfloat16"):
            async with connected(port, hello(dtype, fingerprint={"dtype": dtype})) as (_, told):
                await told.until(("up", 1))
            await heard.until(("closed", dtype, 1))
        heard.hub.close()

    play(scenario)


def test_a_later_start_takes_the_place_of_an_earlier_one() -> None:
    async def scenario() -> None:
        heard = Heard()
        port = await heard.hub.listen("127.0.0.1", 0)
        old_reader, _ = await say(port, hello(epoch=1))
        await heard.until(("connected", "decode-0", 1))
        async with connected(port, hello(epoch=2)):
            await heard.until(("closed", "decode-0", 1), ("connected", "decode-0", 2))
            # It is cut off: what it has yet to read is void.
            with pytest.raises(ConnectionResetError):
                await old_reader.read()
        heard.hub.close()

    play(scenario)


async def say(
    port: int, first: AnyMessage, *others: AnyMessage, token: str = TOKEN
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Behind a handshake."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    handshake = ClientHandshake(token, lambda: frame(first))
    writer.write(handshake.opening)
    writer.write(handshake.take(await reader.readexactly(handshake.num_bytes)))
    writer.write(b"".join(map(frame, others)))
    return reader, writer


def decoded(data: bytes) -> list[AnyMessage]:
    return list(FrameReader().feed(data))


def test_garbage_closes_its_connection_with_one_line_and_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        heard = Heard()
        port = await heard.hub.listen("127.0.0.1", 0)
        async with connected(port, hello("prefill-0")) as (_, told):
            await told.until(("up", 1))
            reader, writer = await say(port, hello("decode-0"))
            await heard.until(("connected", "decode-0", 1))
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with suppress(ConnectionResetError):
                await reader.read()
            await heard.until(("closed", "decode-0", 1))
            heard.hub.send(InstanceId("prefill-0"), Abort([KEY]))
            await told.until(("up", 1), Abort([KEY]))
        heard.hub.close()

    with caplog.at_level(logging.WARNING):
        play(scenario)
    assert [record.getMessage() for record in caplog.records] == [
        f"Closing the connection to decode-0: a frame of {int.from_bytes(b'GET ', 'big')} bytes: "
        f"at most {MAX_FRAME_BYTES} are allowed"
    ]


def test_a_stranger_has_to_say_hello_first_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        heard = Heard()
        port = await heard.hub.listen("127.0.0.1", 0)
        reader, _ = await say(port, Abort([KEY]))
        assert decoded(await reader.read()) == [Refused("the first message is a Abort, must be a Hello")]
        monkeypatch.setattr(hub_module, "HELLO_TIMEOUT_S", 0.05)
        silent, _ = await asyncio.open_connection("127.0.0.1", port)
        assert await until_closed(silent) == b""
        assert heard.events == []
        heard.hub.close()

    play(scenario)


def test_who_does_not_read_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "MAX_UNSENT_BYTES", 100_000)

    async def scenario() -> None:
        heard = Heard()
        port = await heard.hub.listen("127.0.0.1", 0)
        _, deaf = await say(port, hello())
        # it has more than it takes in already
        deaf.transport.pause_reading()  # type: ignore[attr-defined]
        await heard.until(("connected", "decode-0", 1))
        while heard.events[-1] != ("closed", "decode-0", 1):
            heard.hub.send(InstanceId("decode-0"), Release([KEY] * 10_000))
            await asyncio.sleep(0)
        deaf.close()
        heard.hub.close()

    play(scenario)


def test_who_hangs_is_told_of_and_cut_off_and_others_are_not() -> None:
    async def scenario() -> None:
        heard, silent = Heard(), list[str]()
        heard.hub = Hub(TOKEN, heard, silence_s=0.5, on_silent=lambda hello: silent.append(hello.instance_id))
        port = await heard.hub.listen("127.0.0.1", 0)
        async with connected(port, hello("decode-0")) as (_, told):
            await told.until(("up", 1))
            reader, writer = await say(port, hello("decode-1"))
            await heard.until(("closed", "decode-1", 1))
            assert silent == ["decode-1"]
            assert told.events == [("up", 1)], "whoever answers stays, and hears nothing of it"
            with suppress(ConnectionError):
                pings = decoded(await reader.read())
                assert pings == [Welcome(Epoch(1)), *[Ping()] * NUM_PINGS]
            writer.close()
        heard.hub.close()

    play(scenario)


def test_a_router_that_hangs_is_left() -> None:
    async def scenario() -> None:
        # it says that it will not be silent for so long, and is; another keeps its word
        silent, talking = Heard(silence_s=0.2), Heard(silence_s=1.0)
        talking.hub = Hub(TOKEN, talking, silence_s=0.5)
        port, other_port = [await each.hub.listen("127.0.0.1", 0) for each in (silent, talking)]
        async with connected(port, hello()) as (_, told), connected(other_port, hello()) as (_, content):
            await told.until(("up", 1), "down", ("up", 1), "down")
            assert content.events == [("up", 1)]
        for each in (silent, talking):
            each.hub.close()

    play(scenario)


def test_a_connection_outlives_the_router() -> None:
    async def scenario() -> None:
        first = Heard(epoch=1)
        port = await first.hub.listen("127.0.0.1", 0)
        async with connected(port, hello()) as (connection, told):
            await told.until(("up", 1))
            first.hub.close()
            await told.until(("up", 1), "down")
            connection.send(Abort([KEY]))
            second = Heard(epoch=2)
            await second.hub.listen("127.0.0.1", port)
            await told.until(("up", 1), "down", ("up", 2))
            connection.send(Abort([RequestKey(2)]))
            # what was sent while it was down is lost
            await second.until(("connected", "decode-0", 1), ("received", "decode-0", Abort([RequestKey(2)])))
        second.hub.close()

    play(scenario)


def test_a_connection_waits_for_a_router_that_is_not_there_yet() -> None:
    async def scenario() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        async with connected(port, hello()) as (_, told):
            await asyncio.sleep(0.2)
            assert told.events == []
            heard = Heard()
            await heard.hub.listen("127.0.0.1", port)
            await told.until(("up", 1))
        heard.hub.close()

    play(scenario)


@pytest.mark.parametrize("host", ["", "a" * 64 + ".example"], ids=["no socket", "no name"])
def test_a_router_that_is_not_there_is_tried_ever_more_seldom(host: str, tmp_path: Path) -> None:
    waits = list[float]()

    class Impatient(LiveHost):
        def after(self, seconds: float, action: Callable[[], object]) -> Timer:
            waits.append(seconds)
            return super().after(0.0, connection.stop if len(waits) == 6 else action)

    address = RouterAddress(host, 1, TOKEN, None if host else str(tmp_path / "nobody"))
    connection = RouterConnection(address, lambda: hello(), Told(), host=Impatient())
    asyncio.run(connection.run())
    assert waits == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5]


def test_stop_ends_a_connection_and_an_error_of_its_handler_gets_out() -> None:
    async def scenario() -> None:
        heard = Heard()
        port = await heard.hub.listen("127.0.0.1", 0)
        for message, error in ((Stop(), None), (Abort([RequestKey(13)]), RuntimeError)):
            told = Told()
            connection = RouterConnection(RouterAddress("127.0.0.1", port, TOKEN), hello, told)
            running = asyncio.create_task(connection.run())
            await told.until(("up", 1))
            heard.hub.send(InstanceId("decode-0"), message)
            if error is None:
                await running
            else:
                with pytest.raises(error, match="unlucky"):
                    await running
            assert told.events == [("up", 1), "down"]
            await heard.until(("closed", "decode-0", 1))
        heard.hub.close()

    play(scenario)


def test_an_error_of_what_a_connection_repeats_gets_out() -> None:
    async def scenario() -> None:
        heard, told, num_left = Heard(), Told(), [3]
        port = await heard.hub.listen("127.0.0.1", 0)
        connection = RouterConnection(RouterAddress("127.0.0.1", port, TOKEN), hello, told)

        def divide() -> None:
            num_left[0] -= 1
            1 / num_left[0]

        connection.repeat(0.001, divide)
        with pytest.raises(ZeroDivisionError):
            await connection.run()
        assert told.events in ([], [("up", 1), "down"])
        heard.hub.close()

    play(scenario)


def connect_and_hang(port: int) -> None:
    async def connect() -> None:
        await say(port, hello("decode-7"))
        await asyncio.Event().wait()

    with suppress(KeyboardInterrupt):
        asyncio.run(connect())


def test_a_killed_process_is_noticed_at_once() -> None:
    async def scenario() -> None:
        heard = Heard()
        # not by its silence, which no test outlasts
        heard.hub = Hub(TOKEN, heard, silence_s=3600)
        port = await heard.hub.listen("127.0.0.1", 0)
        process = multiprocessing.get_context("spawn").Process(target=connect_and_hang, args=(port,))
        process.start()
        await heard.until(("connected", "decode-7", 1))
        process.kill()
        await heard.until(("closed", "decode-7", 1))
        await asyncio.to_thread(process.join)
        heard.hub.close()

    play(scenario)


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """What came until then."""
    heard = b""
    with suppress(ConnectionResetError):
        while piece := await reader.read(1 << 16):
            heard += piece
    return heard


# ---- strangers ----


def test_a_handshake_is_good_for_one_token_one_direction_and_one_connection() -> None:
    def begun(token: str = TOKEN) -> tuple[ClientHandshake, ServerHandshake, bytes]:
        client, server = ClientHandshake(TOKEN, lambda: b"hello"), ServerHandshake(token)
        return client, server, server.take(client.opening)

    client, server, proven = begun()
    answer = client.take(proven)
    assert server.take(answer[: server.num_bytes]) == b"" and answer.endswith(b"hello")
    assert not client.num_bytes and not server.num_bytes and server.digest == digest_of(b"hello")

    other_client, other_server, other_proven = begun("wrong")
    with pytest.raises(HandshakeError, match="does not know this cluster's token"):
        other_client.take(other_proven)
    for said in (
        # what was good on another connection
        answer[:64],
        # the server's own proof, given back to it
        proven,
        # another introduction than the one that was proved
        digest_of(b"other") + answer[DIGEST_BYTES:64],
        bytes(64),
    ):
        _, server, _ = begun()
        with pytest.raises(HandshakeError):
            server.take(said)
    assert other_server.num_bytes


def test_who_listens_in_the_router_s_place_hears_a_random_number_and_can_order_nothing() -> None:
    async def scenario() -> None:
        heard_first = asyncio.Queue[bytes]()

        async def impersonate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # of a real router's bytes it knows what anyone can: their form
            writer.write(bytes(NONCE_BYTES + DIGEST_BYTES))
            writer.write(frame(Welcome(Epoch(9))) + frame(Stop()) + frame(Refused("go away")))
            heard_first.put_nowait(await until_closed(reader))
            writer.close()

        impostor = await asyncio.start_server(impersonate, "127.0.0.1", 0)
        port = impostor.sockets[0].getsockname()[1]
        async with connected(port, hello()) as (_, told):
            for _ in range(3):
                assert len(await heard_first.get()) == NONCE_BYTES
            assert told.events == []
            impostor.close()
            heard = Heard()
            while True:
                with suppress(OSError):
                    await heard.hub.listen("127.0.0.1", port)
                    break
                await asyncio.sleep(0.01)
            await told.until(("up", 1))
        heard.hub.close()

    play(scenario)


def test_who_listens_and_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HANDSHAKE_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        calls = asyncio.Queue[bytes]()

        async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            calls.put_nowait(await until_closed(reader))
            writer.close()

        silent = await asyncio.start_server(be_silent, "127.0.0.1", 0)
        async with connected(silent.sockets[0].getsockname()[1], hello()) as (_, told):
            for _ in range(2):
                assert len(await calls.get()) == NONCE_BYTES
            assert told.events == []
        silent.close()

    play(scenario)


def test_who_proves_to_be_the_router_and_does_not_greet_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HANDSHAKE_TIMEOUT_S", 0.05)

    class Dumb(Heard):
        def connected(self, hello: Hello) -> None:
            self._note("connected", hello.instance_id, hello.epoch)

    async def scenario() -> None:
        dumb = Dumb()
        port = await dumb.hub.listen("127.0.0.1", 0)
        async with connected(port, hello()) as (_, told):
            came = "connected", "decode-0", 1
            await dumb.until(came, ("closed", "decode-0", 1), came)
            assert told.events == []
        dumb.hub.close()

    play(scenario)


@pytest.mark.parametrize(
    "said",
    [
        bytes(NONCE_BYTES) + bytes(64),
        # as much as a frame may have; nothing of it is kept
        frame(SUBMIT) * 10_000,
        (64 << 20).to_bytes(4, "big") + bytes(1 << 20),
    ],
)
def test_a_stranger_gets_nothing_decoded_and_is_cut_off(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_decoding(body: memoryview) -> AnyMessage:
        raise AssertionError("a stranger's bytes are decoded")

    monkeypatch.setattr("alignedserve.protocol.frames._decode", no_decoding)

    async def scenario() -> None:
        heard = Heard()
        port = await heard.hub.listen("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        answer = await until_closed(reader)
        assert len(answer) <= NONCE_BYTES + DIGEST_BYTES and TOKEN.encode() not in answer
        assert heard.events == []
        writer.close()
        heard.hub.close()

    play(scenario)


def test_strangers_are_bounded_and_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_STRANGERS", 3)

    async def scenario() -> None:
        heard = Heard()
        port = await heard.hub.listen("127.0.0.1", 0)
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        for reader, _ in strangers[:5]:
            assert await until_closed(reader) == b""
        assert len(heard.hub._strangers) == 3
        async with connected(port, hello()) as (_, told):
            await told.until(("up", 1))
        for _, writer in strangers:
            writer.close()
        heard.hub.close()

    play(scenario)


def test_strangers_cannot_fill_a_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        heard = Heard()
        port = await heard.hub.listen("127.0.0.1", 0)
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(bytes(NONCE_BYTES) + bytes(64))
            await until_closed(reader)
            writer.close()
        heard.hub.close()

    with caplog.at_level(logging.WARNING):
        play(scenario)
    assert len(caplog.records) <= 1


def test_the_hello_must_be_the_one_that_was_proved() -> None:
    async def scenario() -> None:
        heard = Heard()
        port = await heard.hub.listen("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        handshake = ClientHandshake(TOKEN, lambda: frame(hello("decode-0")))
        writer.write(handshake.opening)
        answer = handshake.take(await reader.readexactly(handshake.num_bytes))
        writer.write(answer[: 2 * DIGEST_BYTES] + frame(hello("decode-1")))
        assert await until_closed(reader) == b""
        assert heard.events == []
        writer.close()
        heard.hub.close()

    play(scenario)


def test_a_launcher_s_messages_are_small() -> None:
    async def scenario() -> None:
        heard = Heard()
        port = await heard.hub.listen("127.0.0.1", 0)
        reader, writer = await say(port, hello("launcher-0", role="launcher"), Release([KEY] * 100_000))
        await heard.until(("connected", "launcher-0", 1), ("closed", "launcher-0", 1))
        await until_closed(reader)
        writer.close()
        heard.hub.close()

    play(scenario)


# ---- Unix sockets ----


def test_a_connection_finds_the_next_router_at_the_same_socket_which_is_the_user_s_alone(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "router.sock")

    async def scenario() -> None:
        # as kill -9 leaves it: there, and nobody listens
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(path)
        first, second = Heard(epoch=1), Heard(epoch=2)
        await first.hub.listen_unix(path)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        async with connected(0, hello(), path=path) as (connection, told):
            await told.until(("up", 1))
            with pytest.raises(OSError, match="Address already in use"):
                await second.hub.listen_unix(path)
            first.hub.close()
            await told.until(("up", 1), "down")
            await second.hub.listen_unix(path)
            await told.until(("up", 1), "down", ("up", 2))
            connection.send(SUBMIT)
            await second.until(("connected", "decode-0", 1), ("received", "decode-0", SUBMIT))
        second.hub.close()

    play(scenario)


def test_an_address_does_not_show_its_token() -> None:
    for address in (RouterAddress("127.0.0.1", 1, "hidden"), RouterAddress.unix("/a/b", "hidden")):
        assert "hidden" not in repr(address) and "hidden" not in str(address)
    assert str(RouterAddress.unix("/a/b", "")) == "/a/b"


@pytest.mark.parametrize("only", [{"only here": "x"}, {}])
def test_what_only_one_of_two_says_of_itself_is_no_difference(only: dict[str, str]) -> None:
    one, other = (
        hello(name, fingerprint={"dtype": "float32"} | more)
        for name, more in (("a", only), ("b", {"z": "y"}))
    )
    assert hub_module.difference(one, [other]) is hub_module.difference(other, [one]) is None
    assert hub_module.difference(hello("c", fingerprint={"z": "x"}), [one, other]) == "c: z is x, but y at b"


@asynccontextmanager
async def ends(
    is_tcp: bool, on_closed: Callable[[Peer], None] = lambda peer: None
) -> AsyncIterator[tuple[Peer, Peer]]:
    """Both ends of a connection, the router's first. `on_closed` is called when that one is."""
    loop, accepted = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    router = Peer(ServerHandshake(TOKEN), lambda *_: None, on_closed, accepted.set_result)
    instance = Peer(ClientHandshake(TOKEN, bytes), lambda *_: None, lambda _: None)
    if is_tcp:
        server = await loop.create_server(lambda: router, "127.0.0.1", 0)
        await loop.create_connection(lambda: instance, *server.sockets[0].getsockname())
        await accepted
        server.close()
    else:
        ours, theirs = socket.socketpair()
        await loop.create_connection(lambda: router, sock=ours)
        await loop.create_connection(lambda: instance, sock=theirs)
    yield router, instance
    router.abort()
    instance.abort()


@pytest.mark.parametrize("num_unread", [0, 1 << 10, 8 << 20])
@pytest.mark.parametrize("is_tcp", [False, True])
def test_that_the_router_is_gone_is_known_before_all_that_it_said_is_read(
    is_tcp: bool, num_unread: int
) -> None:
    async def run() -> None:
        closed = asyncio.Event()
        async with ends(is_tcp, lambda peer: closed.set()) as (router, instance):
            assert router._transport and instance._transport
            instance._transport.pause_reading()
            router._transport.write(bytes(num_unread))
            await asyncio.sleep(0)
            assert not instance.is_over
            router.abort()
            await closed.wait()
            assert instance.is_over

    asyncio.run(run())


def test_a_connection_that_was_never_made_is_over() -> None:
    assert Peer(ClientHandshake(TOKEN, bytes), lambda *_: None, lambda _: None).is_over


@pytest.mark.parametrize("is_tcp", [False, True])
def test_whoever_acts_on_the_loss_of_a_connection_has_ended_it(is_tcp: bool) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[bool] = loop.create_future()
        ours: list[Peer] = []
        async with ends(is_tcp, lambda peer: found.set_result(ours[0].is_over)) as (router, instance):
            ours.append(instance)
            assert not instance.is_over
            router.abort()
            assert await found

    asyncio.run(run())


@pytest.mark.parametrize("cause", ["a later start", "garbage"])
def test_a_hub_acts_on_the_loss_of_a_connection_that_it_has_ended(cause: str) -> None:
    """Though more waits for the process than its receive buffer holds."""
    was_over = list[bool]()

    class Looking(Heard):
        def closed(self, instance_id: InstanceId, epoch: Epoch) -> None:
            # Errors are reported without being asked for.
            was_over.append(bool(poll.poll(0)))
            super().closed(instance_id, epoch)

    async def scenario() -> None:
        heard = Looking()
        port = await heard.hub.listen("127.0.0.1", 0)
        _, writer = await say(port, hello(epoch=1))
        await heard.until(("connected", "decode-0", 1))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        poll.register(writer.get_extra_info("socket"), select.POLLRDHUP)
        peer = heard.hub._peers[InstanceId("decode-0")]
        assert isinstance(peer, Peer)
        waiting = peer._transport
        while waiting and not waiting.get_write_buffer_size():
            for _ in range(10_000):
                heard.hub.send(InstanceId("decode-0"), Abort([KEY]))
            await asyncio.sleep(0)
        assert not poll.poll(0)
        if cause == "garbage":
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await heard.until(("closed", "decode-0", 1))
        else:
            async with connected(port, hello(epoch=2)):
                await heard.until(("closed", "decode-0", 1), ("connected", "decode-0", 2))
        heard.hub.close()

    poll = select.poll()
    play(scenario)
    assert was_over[0]
