"""The router's shell around the real core, on real sockets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.connection import RefusedByRouter, RouterConnection
from alignedserve.protocol.messages import (
    AnyMessage,
    AskCluster,
    Cluster,
    Drain,
    Hello,
    InstanceLimits,
    Load,
    NewTokens,
    PoolUse,
    Prefill,
    PrefillReport,
    Request,
    Reserve,
    Reserved,
    Stop,
    Submit,
    UsePool,
    Welcome,
)
from alignedserve.router.config import RouterConfig
from alignedserve.router.eventlog import EventLog, replay
from alignedserve.router.events import Send
from alignedserve.router.fence import LiveRouterHost, RouterHost
from alignedserve.router.replay_diff import compare
from alignedserve.router.router import Router
from alignedserve.router.server import RouterServer
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.types import Epoch, InstanceId, PoolBlockId, RequestKey

TOKEN = "secret"
EPOCH = Epoch(5)
LIMITS = InstanceLimits(
    num_blocks=10, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=100
)
EXPECTED = {InstanceId(f"{role}-0"): role for role in ("kvpool", "prefill", "decode")}


class Client:
    """A process as the router sees it: says Hello, and keeps what it hears."""

    def __init__(self, role: str, port: int, segment: str = "", name: str | None = None) -> None:
        self.name = InstanceId(name or f"{role}-0")
        self.heard: list[AnyMessage] = []
        self._changed = asyncio.Event()
        hello = Hello(role, self.name, Epoch(1), os.getpid(), {}, LIMITS, segment)
        self.connection = RouterConnection(RouterAddress("127.0.0.1", port, TOKEN), lambda: hello, self)
        self.running = asyncio.create_task(self.connection.run())

    def on_up(self, welcome: Welcome) -> None:
        self.on_message(welcome)

    def on_message(self, message: AnyMessage) -> None:
        self.heard.append(message)
        self._changed.set()

    def on_down(self) -> None:
        pass

    async def hears(self, kind: type[Any], count: int = 1) -> Any:
        while sum(isinstance(message, kind) for message in self.heard) < count:
            self._changed.clear()
            await self._changed.wait()
        return next(message for message in reversed(self.heard) if isinstance(message, kind))

    async def ask_cluster(self) -> Cluster:
        self.connection.send(AskCluster(9))
        found: Cluster = await self.hears(Cluster)
        return found


@asynccontextmanager
async def serving(
    log: EventLog | None = None, host: RouterHost | None = None
) -> AsyncIterator[tuple[RouterServer, int, asyncio.Task[None]]]:
    server = RouterServer(Router(RouterConfig(link="host"), EPOCH), EPOCH, TOKEN, EXPECTED, log, host=host)
    port = await server.listen("127.0.0.1", 0)
    running = asyncio.create_task(server.run())
    yield server, port, running
    server.stop()
    await asyncio.wait([running])


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within_time() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(within_time())


def submit(num_prompt: int = 20) -> Submit:
    request = Request(RequestKey(7), [1] * num_prompt, SamplingParams(), seed=1, arrival_s=0.0)
    return Submit(request)


def test_events_reach_the_core_and_its_orders_their_addressees() -> None:
    async def scenario() -> None:
        async with serving() as (_, port, _):
            gateway, pool = Client("gateway", port), Client("kvpool", port, "segment-1")
            prefill = Client("prefill", port)
            assert (await prefill.hears(UsePool)).segment == "segment-1"
            gateway.connection.send(submit())
            assert (await pool.hears(Reserve)).key == 7

    play(scenario)


def test_the_cluster_is_described_with_who_is_missing() -> None:
    async def scenario() -> None:
        async with serving() as (_, port, _):
            gateway, pool = Client("gateway", port), Client("kvpool", port, "segment-1")
            prefill = Client("prefill", port)
            await prefill.hears(UsePool)
            gateway.connection.send(submit())
            number = (await pool.hears(Reserve)).number
            pool.connection.send(PoolUse(1, 3, num_kept_blocks=2, num_shared_blocks=4))
            pool.connection.send(Reserved(RequestKey(7), [PoolBlockId(0), PoolBlockId(1)], number=number))
            while (cluster := await gateway.ask_cluster()).requests != {"prefilling": 1}:
                gateway.heard.clear()
            processes = {process.instance_id: process for process in cluster.processes}
            assert list(processes) == ["router", "kvpool-0", "prefill-0", "decode-0", "gateway-0"]
            assert processes[InstanceId("decode-0")].state == "down"
            assert (
                processes[InstanceId("kvpool-0")].num_blocks,
                processes[InstanceId("kvpool-0")].num_free_blocks,
            ) == (10, 3)
            assert processes[InstanceId("kvpool-0")].num_kept_blocks == 2
            assert processes[InstanceId("kvpool-0")].num_shared_blocks == 4
            assert processes[InstanceId("prefill-0")].requests == {"prefilling": 1}
            assert processes[InstanceId("router")].pid == os.getpid()

    play(scenario)


def test_launchers_hear_who_comes_and_goes() -> None:
    async def scenario() -> None:
        async with serving() as (_, port, _):
            launcher = Client("launcher", port)
            await launcher.hears(Cluster, 1)
            decode = Client("decode", port)
            assert "up" in states(await launcher.hears(Cluster, 2), "decode-0")
            decode.connection.stop()
            assert "down" in states(await launcher.hears(Cluster, 3), "decode-0")

    play(scenario)


def test_launchers_and_gateways_hear_the_load_as_it_is() -> None:
    async def scenario() -> None:
        async with serving() as (_, port, _):
            launcher, gateway, decode = (Client(role, port) for role in ("launcher", "gateway", "decode"))
            assert (await launcher.hears(Load)).num_requests == 0
            gateway.connection.send(submit())
            for each in (launcher, gateway):
                while not (await each.hears(Load)).num_requests:
                    each.heard.clear()
            assert not any(isinstance(message, Load) for message in decode.heard)

    play(scenario)


def states(cluster: Cluster, name: str) -> list[str]:
    return [process.state for process in cluster.processes if process.instance_id == name]


def test_who_says_what_is_not_his_is_cut_off() -> None:
    async def scenario() -> None:
        async with serving() as (_, port, running):
            launcher, gateway = Client("launcher", port), Client("gateway", port)
            await gateway.hears(Welcome)
            gateway.connection.send(PoolUse(1, 1))
            # it connects again
            await gateway.hears(Welcome, 2)
            assert len(await hears_of(launcher, "gateway-0")) >= 2 and not running.done()

    play(scenario)


@pytest.mark.parametrize("role", ["decode", "prefill", "kvpool", "gateway"])
@pytest.mark.parametrize("order", [Stop(), Drain()])
def test_the_launcher_alone_ends_the_system(role: str, order: AnyMessage) -> None:
    async def scenario() -> None:
        async with serving() as (_, port, running):
            other = Client(role, port)
            await other.hears(Welcome)
            other.connection.send(order)
            # its connection was closed, and it is back
            await other.hears(Welcome, 2)
            assert not running.done()

    play(scenario)


@pytest.mark.parametrize(
    ("role", "name"), [("decode", "decode-9"), ("launcher", "decode-0"), ("launcher", "x")]
)
def test_whom_the_launcher_has_not_made_is_refused(role: str, name: str) -> None:
    async def scenario() -> None:
        async with serving() as (_, port, _):
            other = Client(role, port, name=name)
            with pytest.raises(RefusedByRouter, match=f"{name}: there is no {role} with this name here"):
                await other.running

    play(scenario)


async def hears_of(launcher: Client, name: str) -> list[Cluster]:
    await launcher.hears(Cluster, 3)
    return [message for message in launcher.heard if isinstance(message, Cluster) and states(message, name)]


def test_stop_reaches_everyone() -> None:
    async def scenario() -> None:
        async with serving() as (_, port, running):
            clients = [Client(role, port) for role in ("launcher", "gateway", "decode")]
            for client in clients:
                await client.hears(Welcome)
            clients[0].connection.send(Stop())
            await asyncio.gather(running, *(client.running for client in clients))

    play(scenario)


def test_a_core_that_fails_ends_the_process() -> None:
    async def scenario() -> None:
        async with serving() as (_, port, running):
            gateway = Client("gateway", port)
            await gateway.hears(Welcome)
            gateway.connection.send(submit())
            prefill = Client("prefill", port)
            pool = Client("kvpool", port, "segment-1")
            number = (await pool.hears(Reserve)).number
            pool.connection.send(Reserved(RequestKey(7), [PoolBlockId(0), PoolBlockId(1)], number=number))
            await prefill.hears(Prefill)
            broken = NewTokens(RequestKey(7), 5, [1])
            prefill.connection.send(PrefillReport([broken], [], [], [], 10))
            with pytest.raises(RuntimeError, match="request 7 has 0 tokens, but 5 come before the new ones"):
                await running

    play(scenario)


def test_a_tick_that_fails_ends_the_process() -> None:
    class ForgetfulHost(LiveRouterHost):
        num_asked = 0

        def is_user(self, pid: int, segment: str) -> bool:
            self.num_asked += 1
            if self.num_asked > 1:
                raise RuntimeError("unlucky")
            return True

    async def scenario() -> None:
        async with serving(host=ForgetfulHost()) as (_, port, running):
            decode = Client("decode", port)
            await decode.hears(Welcome)
            # The host is asked about it now, and again at the next tick.
            decode.connection.stop()
            with pytest.raises(RuntimeError, match="unlucky"):
                await running

    play(scenario)


def test_the_event_log_replays_to_the_same_orders(tmp_path: Path) -> None:
    orders: list[Send] = []

    async def scenario() -> None:
        with (tmp_path / "log").open("wb", buffering=0) as file:
            async with serving(EventLog(file, RouterConfig(link="host"), EPOCH, SchedulingConfig())) as (
                server,
                port,
                _,
            ):
                core_on = server._router.on

                def noting(event: Any, now: float) -> list[Send]:
                    sends = core_on(event, now)
                    orders.extend(sends)
                    return sends

                server._router.on = noting  # type: ignore[method-assign]
                gateway, pool = Client("gateway", port), Client("kvpool", port, "segment-1")
                prefill = Client("prefill", port)
                await prefill.hears(UsePool)
                gateway.connection.send(submit())
                await pool.hears(Reserve)

    play(scenario)
    assert orders
    assert [send for _, _, sends in replay(tmp_path / "log") for send in sends] == orders
    compared = compare(tmp_path / "log")
    assert compared.num_events > 3 and not compared.divergence and not compared.num_unanswered
