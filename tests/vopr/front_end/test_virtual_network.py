"""The real hub and the real connections on a network in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from random import Random

import pytest

from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.connection import RouterConnection, new_epoch
from alignedserve.protocol.hub import SILENCE_S, Hub
from alignedserve.protocol.messages import Abort, AnyMessage, Echo, Hello, InstanceLimits, Welcome
from alignedserve.types import Epoch, InstanceId, RequestKey
from alignedserve.vopr.front_end.virtual_host import hosted
from alignedserve.vopr.front_end.virtual_loop import VirtualLoop
from alignedserve.vopr.front_end.virtual_network import VirtualConnection, VirtualNetwork

ADDRESS = RouterAddress("router", 1, "secret")
ME = InstanceId("gateway-0")


class Router:
    """Answers each Echo."""

    def __init__(self, epoch: int = 1) -> None:
        self.hub = Hub(ADDRESS.token, self)
        self.epoch = epoch
        self.heard: list[object] = []

    def connected(self, hello: Hello) -> None:
        self.heard.append("connected")
        self.hub.send(hello.instance_id, Welcome(Epoch(self.epoch), SILENCE_S))

    def received(self, hello: Hello, message: AnyMessage) -> None:
        self.heard.append(message)
        if isinstance(message, Echo):
            self.hub.send(hello.instance_id, message)

    def closed(self, instance_id: InstanceId, epoch: Epoch) -> None:
        self.heard.append("closed")

    async def run(self) -> None:
        await self.hub.listen(ADDRESS.host, ADDRESS.port)
        await asyncio.get_running_loop().create_future()


class Client:
    def __init__(self) -> None:
        hello = Hello("gateway", ME, new_epoch(), 0, {}, InstanceLimits())
        self.link = RouterConnection(ADDRESS, lambda: hello, self)
        self.heard: list[object] = []
        self.times_s: list[float] = []

    def on_up(self, welcome: Welcome) -> None:
        self._note(("up", welcome.router_epoch))

    def on_message(self, message: AnyMessage) -> None:
        self._note(message)

    def on_down(self) -> None:
        self._note("down")

    def _note(self, what: object) -> None:
        self.heard.append(what)
        self.times_s.append(asyncio.get_running_loop().time())


class Pair:
    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.network: VirtualNetwork = loop.network
        self.router, self.client = Router(), Client()
        self.routers, self.clients = loop.new_process("router"), loop.new_process("client")
        self.routers.start(self.router.run())
        self.clients.start(self.client.link.run())

    @property
    def connection(self) -> VirtualConnection:
        return next(iter(self.network.connections.values()))

    async def until_up(self) -> None:
        while not self.client.link.is_up:
            await asyncio.sleep(0.01)

    def clear(self) -> None:
        self.client.heard.clear()
        self.client.times_s.clear()
        self.router.heard.clear()


Scenario = Callable[[Pair], Awaitable[None]]


@pytest.fixture
def play() -> Iterator[Callable[[Scenario], None]]:
    loop = VirtualLoop()
    random = Random(5)
    loop.network.latency = lambda process, is_up: random.expovariate(1000)
    loop.network.piece_bytes = lambda process, is_up: random.choice((1, 7, 100, 5000))

    def played(scenario: Scenario) -> None:
        async def main() -> None:
            async with asyncio.timeout(3600):
                await scenario(Pair(loop))

        with hosted(loop.clock, 5):
            loop.run(main())
        assert not loop.errors

    yield played


Play = Callable[[Scenario], None]


def test_messages_go_both_ways_in_order_whatever_the_pieces(play: Play) -> None:
    async def scenario(pair: Pair) -> None:
        await pair.until_up()
        assert pair.router.heard == ["connected"] and pair.client.heard == [("up", 1)]
        pair.clear()
        sent = [message for number in range(200) for message in (Echo(number), Abort([RequestKey(number)]))]
        for message in sent:
            pair.client.link.send(message)
        await asyncio.sleep(5)
        assert pair.router.heard == sent
        assert pair.client.heard == [Echo(number) for number in range(200)]

    play(scenario)


def test_a_cut_loses_what_was_under_way_and_the_connection_is_made_again(play: Play) -> None:
    async def scenario(pair: Pair) -> None:
        await pair.until_up()
        pair.clear()
        pair.client.link.send(Echo(1))
        await asyncio.sleep(0)
        pair.connection.cut()
        await asyncio.sleep(1)
        assert pair.client.heard == ["down", ("up", 1)]
        assert pair.router.heard == ["closed", "connected"]
        assert len(pair.network.connections) == 1

    play(scenario)


def test_a_router_that_hangs_is_cut_off_after_the_silence(play: Play) -> None:
    async def scenario(pair: Pair) -> None:
        await pair.until_up()
        pair.clear()
        begun_s = pair.loop.time()
        pair.routers.hang()
        await asyncio.sleep(3 * SILENCE_S)
        # Connecting again succeeds, since a kernel accepts connections, but no handshake does.
        assert pair.client.heard == ["down"]
        assert SILENCE_S <= pair.client.times_s[0] - begun_s < 1.5 * SILENCE_S
        pair.routers.wake_up()
        await asyncio.sleep(SILENCE_S)
        assert pair.client.heard == ["down", ("up", 1)]

    play(scenario)


def test_a_process_that_hangs_is_cut_off_after_the_silence(play: Play) -> None:
    async def scenario(pair: Pair) -> None:
        await pair.until_up()
        pair.clear()
        pair.clients.hang()
        await asyncio.sleep(SILENCE_S)
        assert not pair.router.heard
        await asyncio.sleep(SILENCE_S)
        assert pair.router.heard == ["closed"] and not pair.client.heard
        pair.clients.wake_up()
        await asyncio.sleep(1)
        assert pair.client.heard == ["down", ("up", 1)] and pair.router.heard == ["closed", "connected"]

    play(scenario)


def test_a_wire_that_is_gone_is_noticed_at_both_ends_by_silence(play: Play) -> None:
    async def scenario(pair: Pair) -> None:
        await pair.until_up()
        pair.clear()
        pair.connection.vanish()
        await asyncio.sleep(2 * SILENCE_S)
        assert pair.client.heard == ["down", ("up", 1)]
        assert pair.router.heard == ["closed", "connected"]

    play(scenario)


def test_a_stalled_connection_loses_nothing(play: Play) -> None:
    async def scenario(pair: Pair) -> None:
        await pair.until_up()
        pair.clear()
        pair.client.link.send(Echo(1))
        await asyncio.sleep(0)
        pair.connection.stall(2.0)
        for number in range(2, 10):
            await asyncio.sleep(0.1)
            pair.client.link.send(Echo(number))
        await asyncio.sleep(1)
        assert not pair.router.heard
        await asyncio.sleep(1)
        assert pair.router.heard == [Echo(number) for number in range(1, 10)] == pair.client.heard

    play(scenario)


def test_a_half_open_connection_is_found_by_the_next_ping(play: Play) -> None:
    async def scenario(pair: Pair) -> None:
        await pair.until_up()
        pair.clear()
        pair.network.refused.add((ADDRESS.host, ADDRESS.port))
        pair.connection.half_open(pair.connection.client)
        await asyncio.sleep(0.001)
        assert pair.client.heard == ["down"] and not pair.router.heard
        await asyncio.sleep(SILENCE_S)
        assert pair.client.heard == ["down"] and pair.router.heard == ["closed"]
        pair.network.refused.clear()
        await asyncio.sleep(1)
        assert pair.client.heard == ["down", ("up", 1)]

    play(scenario)


def test_a_router_dies_and_a_new_one_comes(play: Play) -> None:
    async def scenario(pair: Pair) -> None:
        await pair.until_up()
        pair.clear()
        pair.routers.kill()
        await asyncio.sleep(3)
        assert pair.client.heard == ["down"]
        second = Router(epoch=2)
        pair.loop.new_process("router").start(second.run())
        await asyncio.sleep(1)
        assert pair.client.heard == ["down", ("up", 2)] and second.heard == ["connected"]
        pair.clients.kill()
        await asyncio.sleep(1)
        assert second.heard == ["connected", "closed"] and not pair.network.connections

    play(scenario)


class Flow(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.received = bytearray()
        self.calls: list[object] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")

    def eof_received(self) -> None:
        self.calls.append("eof")

    def connection_lost(self, error: Exception | None) -> None:
        self.calls.append(error)


def test_a_reader_that_stops_makes_the_writer_wait_as_on_a_socket() -> None:
    """The same calls are made on virtual time and on a real socket."""
    on_virtual_time = VirtualLoop().run(_flow("somewhere", 1))
    on_a_socket = asyncio.run(_flow("127.0.0.1", 0))
    assert on_virtual_time == on_a_socket == [["pause", "resume", None], ["eof", None], True]


async def _flow(host: str, port: int) -> list[object]:
    loop, ends = asyncio.get_running_loop(), list[Flow]()

    def accepted() -> Flow:
        ends.append(Flow())
        return ends[0]

    server = await loop.create_server(accepted, host, port)
    transport, client = await loop.create_connection(Flow, host, server.sockets[0].getsockname()[1])
    while not ends:
        await asyncio.sleep(0.001)
    ends[0].transport.pause_reading()
    data = Random(1).randbytes(16 << 20)
    transport.write(data)
    await asyncio.sleep(0.01)
    is_waiting = transport.get_write_buffer_size() > 1 << 20
    # It is closed after all that was written.
    transport.close()
    ends[0].transport.resume_reading()
    while None not in ends[0].calls or None not in client.calls:
        await asyncio.sleep(0.001)
    server.close()
    return [client.calls, ends[0].calls, is_waiting and ends[0].received == data]
