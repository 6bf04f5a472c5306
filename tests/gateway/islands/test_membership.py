"""Islands come and go while the gateway runs, reported by the launcher's real end: no stream loses a token."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from alignedserve.gateway import launcher_link
from alignedserve.gateway.http.keys import EXPIRED, Keys, owners_of
from alignedserve.gateway.http.server import GatewayServer
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.launch.gateway_links import GatewayLinks
from alignedserve.launch.ports import free_port
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.connection import RefusedByRouter, RouterConnection
from alignedserve.protocol.messages import (
    AnyMessage,
    Attainment,
    GatewayNews,
    Hello,
    InstanceLimits,
    Load,
    Welcome,
)
from alignedserve.types import Epoch, InstanceId, gateway_ids, island_gateway
from tests.gateway.scripted import TOKEN, ScriptedRouter
from tests.gateway.served import GATEWAY, QuickGateway, Served, play, served
from tests.store.redis_process import redis_running


@dataclass
class Seen:
    """What a supervisor hears of its process."""

    is_up: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def seen(self, by: str, detail: str) -> None:
        self.is_up = True
        self.changed.set()

    def unseen(self, by: str, is_dead: bool) -> None:
        self.is_up = False
        self.changed.set()

    async def until(self, is_up: bool) -> None:
        while self.is_up != is_up:
            self.changed.clear()
            await self.changed.wait()


class CountedLinks(GatewayLinks):
    """Counts the reports of gateways."""

    num_reports = 0

    def received(self, hello: Hello, message: AnyMessage) -> None:
        self.num_reports += isinstance(message, Attainment)
        super().received(hello, message)


@dataclass
class Launcher:
    address: RouterAddress
    links: CountedLinks
    gateway: Seen
    others: list[Seen]

    @property
    def has_gateway(self) -> bool:
        return any(hello.instance_id == GATEWAY for hello in self.links._hub)


async def until(is_so: Callable[[], bool]) -> None:
    """The scenario has a time limit."""
    while not is_so():
        await asyncio.sleep(0.01)


@asynccontextmanager
async def launcher(address: RouterAddress | None = None, gateways: int = 1) -> AsyncIterator[Launcher]:
    seen = {name: Seen() for name in gateway_ids(gateways)}
    address = address or RouterAddress("127.0.0.1", free_port("127.0.0.1"), TOKEN)
    links = CountedLinks(address, seen)
    await links.listen()
    gateway, *others = seen.values()
    try:
        yield Launcher(address, links, gateway, others)
    finally:
        links.close()


async def one_more() -> tuple[ScriptedRouter, RouterAddress]:
    router = ScriptedRouter(epoch=2)
    return router, RouterAddress("127.0.0.1", await router.hub.listen("127.0.0.1", 0), TOKEN)


def first_of(at: Served) -> RouterAddress:
    return RouterAddress("127.0.0.1", at.router_port, TOKEN)


async def begun(at: Served) -> Any:
    """A stream of which one token has come."""
    stream = await at.client.completions.create(model="demo", prompt="x", stream=True)
    chunk = await anext(stream)
    assert chunk.choices[0].text
    return stream, chunk.choices[0].text


async def rest(stream: Any) -> str:
    return "".join([chunk.choices[0].text async for chunk in stream])


@pytest.mark.slow
@pytest.mark.parametrize("is_dead", [False, True], ids=["given back", "dead"])
def test_what_is_open_goes_on_where_another_island_has_come(is_dead: bool) -> None:
    async def scenario() -> None:
        async with launcher() as launched, served(launcher=launched.address) as at:
            await launched.gateway.until(is_up=True)
            at.router.allow(2)
            stream, text = await begun(at)
            other, address = await one_more()
            if is_dead:
                at.router.hub.close()
            launched.links.tell({1: address}, [])
            assert text + await rest(stream) == "one two three"
            (again,) = other.submitted
            assert len(again.delivered) == 2
            await at.router.until(lambda: list(at.router.hub) == [])
            body = (await at.http.get("/v1/cluster")).json()
            assert {each["island"] for each in body["processes"]} == {1}
            other.hub.close()

    play(scenario)


@pytest.mark.slow
def test_a_gateway_that_retires_answers_what_it_has_and_says_when_a_connection_ends() -> None:
    async def scenario() -> None:
        async with launcher() as launched, served(launcher=launched.address) as at:
            await launched.gateway.until(is_up=True)
            at.router.allow(2)
            stream, text = await begun(at)
            assert (await at.http.get("/v1/models")).headers.get("connection") != "close"
            launched.links.retire(GATEWAY)
            # Over the connection that was kept; nobody takes a new one here.
            while (await at.http.get("/v1/models")).headers.get("connection") != "close":
                await asyncio.sleep(0)
            assert not launched.gateway.is_up, "nobody supervises it"
            assert launched.has_gateway
            at.router.allow(None)
            assert text + await rest(stream) == "one two three"
            await at.client.close()
            await until(lambda: not launched.has_gateway)

    play(scenario)


@pytest.mark.slow
def test_a_gateway_that_was_away_when_it_was_to_retire_hears_it_when_it_is_back() -> None:
    async def scenario() -> None:
        gateway = Seen()
        address = RouterAddress("127.0.0.1", free_port("127.0.0.1"), TOKEN)
        links = GatewayLinks(address, {GATEWAY: gateway})
        async with served(launcher=address) as at:
            # This connection is kept: later nobody takes a new one.
            assert (await at.http.get("/v1/models")).headers.get("connection") != "close"
            links.retire(GATEWAY)
            await links.listen()
            while (await at.http.get("/v1/models")).headers.get("connection") != "close":
                await asyncio.sleep(0.01)
            assert not gateway.is_up
            await at.client.close()
            await until(lambda: not [*links._hub])
            links.close()

    play(scenario)


def test_what_is_open_waits_for_an_island_that_is_not_up_yet() -> None:
    async def scenario() -> None:
        async with launcher() as launched, served(launcher=launched.address) as at:
            await launched.gateway.until(is_up=True)
            at.router.allow(1)
            stream, text = await begun(at)
            address = RouterAddress("127.0.0.1", free_port("127.0.0.1"), TOKEN)
            launched.links.tell({1: address}, [])
            await at.router.until(lambda: list(at.router.hub) == [])
            asking = asyncio.create_task(at.post("/v1/completions", {"prompt": "x"}))
            other = ScriptedRouter(epoch=2)
            await other.hub.listen(address.host, address.port)
            assert text + await rest(stream) == "one two three"
            assert (await asking).status_code == 200
            other.hub.close()

    play(scenario)


@pytest.mark.slow
def test_an_island_that_stays_keeps_what_is_open() -> None:
    async def scenario() -> None:
        async with launcher() as launched, served(launcher=launched.address) as at:
            await launched.gateway.until(is_up=True)
            at.router.allow(1)
            stream, text = await begun(at)
            other, address = await one_more()
            launched.links.tell({0: first_of(at), 1: address}, [])
            await other.until(lambda: list(other.hub) != [])
            at.router.allow(None)
            assert text + await rest(stream) == "one two three"
            assert not other.submitted and len(at.router.submitted) == 1
            # The fewest open requests are there now: none at either, so the first; with one open, the other.
            at.router.allow(1)
            stream, _ = await begun(at)
            assert (await at.post("/v1/completions", {"prompt": "x"})).status_code == 200
            assert len(other.submitted) == 1
            at.router.allow(None)
            await rest(stream)
            other.hub.close()

    play(scenario)


@pytest.mark.slow
def test_an_island_that_is_being_given_back_keeps_what_it_has_and_gets_no_more() -> None:
    async def scenario() -> None:
        async with launcher() as launched, served(launcher=launched.address) as at:
            await launched.gateway.until(is_up=True)
            at.router.allow(1)
            stream, text = await begun(at)
            other, address = await one_more()
            launched.links.tell({0: first_of(at), 1: address}, [], leaving=[1])
            await other.until(lambda: list(other.hub) != [])
            # It would be the other's turn.
            at.router.allow(None)
            assert (await at.post("/v1/completions", {"prompt": "x"})).status_code == 200
            assert not other.submitted
            at.router.allow(1)
            held, begun_with = await begun(at)
            launched.links.tell({0: first_of(at), 1: address}, [], leaving=[0])
            while not other.submitted:
                assert (await at.post("/v1/completions", {"prompt": "x"})).status_code == 200
            num_there = len(at.router.submitted)
            assert (await at.post("/v1/completions", {"prompt": "x"})).status_code == 200
            at.router.allow(None)
            assert text + await rest(stream) == begun_with + await rest(held) == "one two three"
            assert len(at.router.submitted) == num_there
            other.hub.close()

    play(scenario)


@pytest.mark.slow
def test_requests_go_where_less_waits_by_the_word_of_routers() -> None:
    async def scenario() -> None:
        async with launcher() as launched, served(launcher=launched.address) as at:
            await launched.gateway.until(is_up=True)
            other, address = await one_more()
            launched.links.tell({0: first_of(at), 1: address}, [])
            await other.until(lambda: list(other.hub) != [])
            busy, idle = (Load(count, 0.0, num_rt_tokens=count, num_prefills=1) for count in (1000, 0))
            at.router.hub.send(GATEWAY, busy)
            other.hub.send(GATEWAY, idle)
            while not other.submitted:
                assert (await at.post("/v1/completions", {"prompt": "x"})).status_code == 200
            num_there = len(at.router.submitted)
            for _ in range(3):
                assert (await at.post("/v1/completions", {"prompt": "x"})).status_code == 200
            assert len(at.router.submitted) == num_there
            other.hub.close()

    play(scenario)


def test_health_says_what_is_missing() -> None:
    async def scenario() -> None:
        async with launcher() as launched, served(launcher=launched.address) as at:
            await launched.gateway.until(is_up=True)
            await at.router.until(lambda: list(at.router.hub) != [])
            assert (await at.http.get("/health")).json() == {"status": "ok"}
            launched.links.tell({0: first_of(at)}, ["1 of 2 islands are there"])
            while (health := (await at.http.get("/health")).json()) == {"status": "ok"}:
                await asyncio.sleep(0.01)
            assert health == {"status": "degraded", "missing": ["1 of 2 islands are there"]}

    play(scenario)


@pytest.mark.slow
def test_a_launcher_that_is_back_says_what_has_changed() -> None:
    async def scenario() -> None:
        async with launcher() as launched, served(launcher=launched.address) as at:
            await launched.gateway.until(is_up=True)
            launched.links.close()
            # Nothing changes while it is away.
            assert (await at.post("/v1/completions", {"prompt": "x"})).status_code == 200
            other, address = await one_more()
            async with launcher(launched.address) as back:
                back.links.tell({1: address}, [])
                await other.until(lambda: list(other.hub) != [])
            other.hub.close()

    play(scenario)


def with_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def status(at: Served, key: str) -> int:
    return (await at.http.get("/v1/models", headers=with_key(key))).status_code


def test_keys_are_those_that_the_launcher_sends() -> None:
    """Also in a gateway that was planned with others, as one is that was started again."""

    async def scenario() -> None:
        planned = owners_of(["old"], None)
        address = RouterAddress("127.0.0.1", free_port("127.0.0.1"), TOKEN)
        async with served(launcher=address, key_owners=planned) as at:
            # no answer before the launcher has sent the list: it may have another one
            asking = asyncio.create_task(status(at, "old"))
            async with launcher(address) as launched:
                launched.links.set_keys(owners_of(["new"], None))
                assert (await asking, await status(at, "new")) == (401, 200)
                launched.links.set_keys(owners_of(["newer"], None))
                while await status(at, "new") != 401:
                    await asyncio.sleep(0.01)
                assert await status(at, "newer") == 200
            # while the launcher is away
            assert (await status(at, "newer"), await status(at, "new")) == (200, 401)

    play(scenario)


@pytest.mark.parametrize("may_change", [False, True], ids=["fixed", "of a file"])
def test_without_a_launcher_keys_that_may_have_been_revoked_are_good_for_a_while(
    may_change: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_link, "KEYS_EXPIRE_S", 0.0)
    is_down = asyncio.Event()

    class Watched(launcher_link.LauncherLink):
        def on_down(self) -> None:
            super().on_down()
            is_down.set()

    monkeypatch.setattr("alignedserve.gateway.process.LauncherLink", Watched)

    async def scenario() -> None:
        owners = owners_of(["key"], None)
        address = RouterAddress("127.0.0.1", free_port("127.0.0.1"), TOKEN)
        async with served(launcher=address, key_owners=owners, keys_may_change=may_change) as at:
            async with launcher(address) as launched:
                launched.links.set_keys(owners)
                assert await status(at, "key") == 200
                await launched.gateway.until(is_up=True)
            await is_down.wait()
            if not may_change:
                assert await status(at, "key") == 200
                return
            while await status(at, "key") == 200:
                await asyncio.sleep(0.01)
            answer = await at.http.get("/v1/models", headers=with_key("key"))
            assert answer.status_code == 503 and answer.json()["error"]["message"] == EXPIRED
            assert await status(at, "other") == 503
            health = await at.http.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "unavailable", "reason": EXPIRED})
            async with launcher(address) as back:
                back.links.set_keys(owners_of(["newer"], None))
                await back.gateway.until(is_up=True)
                while await status(at, "newer") != 200:
                    await asyncio.sleep(0.01)
                assert await status(at, "key") == 401
                assert (await at.http.get("/health")).status_code == 200

    play(scenario)


def test_the_share_of_a_key_follows_the_number_of_owners() -> None:
    """A single owner may have all of the store, one of several the half of it."""

    async def scenario() -> None:
        address = RouterAddress("127.0.0.1", free_port("127.0.0.1"), TOKEN)
        one, two = (owners_of(keys, None) for keys in (["first"], ["first", "second"]))
        limits = CallLimits(max_stored_bytes=100_000)
        async with redis_running() as redis, launcher(address) as launched:
            launched.links.set_keys(one)
            settings: Any = {"key_owners": one, "store_url": redis.url, "limits": limits}
            async with served(launcher=address, **settings) as at:

                async def upload() -> httpx2.Response:
                    return await at.http.post(
                        "/v1/files",
                        headers=with_key("first"),
                        data={"purpose": "batch"},
                        files={"file": ("in.jsonl", b"x" * 70_000)},
                    )

                file = (await upload()).json()["id"]
                assert (await at.http.delete(f"/v1/files/{file}", headers=with_key("first"))).is_success
                launched.links.set_keys(two)
                while await status(at, "second") != 200:
                    await asyncio.sleep(0.01)
                refused = await upload()
                assert refused.status_code == 413
                assert "yours may have 50000 bytes" in refused.json()["error"]["message"]
                launched.links.set_keys(one)
                while await status(at, "second") == 200:
                    await asyncio.sleep(0.01)
                assert (await upload()).status_code == 200

    play(scenario)


def test_a_gateway_is_up_once_it_answers() -> None:
    """Not while it waits for its keys, or while its server starts."""
    may_start = asyncio.Event()

    class LateServer(GatewayServer):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await may_start.wait()
            await super().startup(sockets)

    class Late(QuickGateway):
        def make_server(self, app: FastAPI) -> GatewayServer:
            return LateServer(app, self.telemetry.traces.around)

    async def scenario() -> None:
        owners = owners_of(["key"], None)
        address = RouterAddress("127.0.0.1", free_port("127.0.0.1"), TOKEN)
        async with (
            launcher(address) as launched,
            served(launcher=address, key_owners=owners, kind=Late) as at,
        ):
            serving = asyncio.create_task(launched.links.until_serving(GATEWAY))
            await until(lambda: launched.has_gateway)
            launched.links.set_keys(owners)
            # What the gateway says after it has got the keys arrives after this.
            num_before = launched.links.num_reports
            await until(lambda: launched.links.num_reports >= num_before + 2)
            was_up = launched.gateway.is_up or serving.done()
            # Otherwise it could not stop.
            may_start.set()
            assert not was_up
            await launched.gateway.until(is_up=True)
            await serving
            assert await status(at, "key") == 200

    play(scenario)


def test_a_list_without_keys_is_refused() -> None:
    keys = Keys(owners_of(["secret"], None))
    with pytest.raises(ValueError, match="open to everyone"):
        keys.change({})
    assert keys.owner(None) is None and keys.owner("Bearer secret")


def test_it_drains_and_ends_as_the_launcher_says() -> None:
    async def scenario() -> None:
        async with launcher() as launched, served(launcher=launched.address) as at:
            await launched.gateway.until(is_up=True)
            at.router.allow(1)
            stream, text = await begun(at)
            launched.links.drain()
            while (await at.http.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
            at.router.allow(None)
            assert text + await rest(stream) == "one two three"
            await launched.gateway.until(is_up=False)

    play(scenario)


@pytest.mark.slow
def test_stop_ends_it_at_once() -> None:
    async def scenario() -> None:
        async with launcher() as launched, served(launcher=launched.address) as at:
            await launched.gateway.until(is_up=True)
            launched.links.stop()
            await launched.gateway.until(is_up=False)
            await at.router.until(lambda: list(at.router.hub) == [])

    play(scenario)


@pytest.mark.slow
def test_only_gateways_of_the_system_are_told() -> None:
    class Nobody:
        def on_up(self, welcome: Welcome) -> None:
            raise AssertionError("it was taken in")

        def on_down(self) -> None: ...

        def on_message(self, message: AnyMessage) -> None: ...

    async def scenario() -> None:
        async with launcher() as launched:
            for role, name in (("gateway", "gateway-9"), ("decode", "gateway-0")):
                hello = Hello(role, InstanceId(name), Epoch(1), 1, {}, InstanceLimits())
                with pytest.raises(RefusedByRouter, match=f"there is no {role} with this name here"):
                    await RouterConnection(launched.address, lambda hello=hello: hello, Nobody()).run()  # type: ignore[misc]
            assert not launched.gateway.is_up

    play(scenario)


@pytest.mark.slow
def test_gateways_at_one_port_know_what_the_others_have_measured() -> None:
    """Prometheus asks any of them."""
    prompts = "alignedserve:prompt_tokens_total"

    async def scenario() -> None:
        async with launcher(gateways=2) as launched:
            heard: asyncio.Queue[GatewayNews] = asyncio.Queue()
            other = Other(launched.address, heard)
            running = asyncio.create_task(other.link.run())
            async with served(launcher=launched.address, num_gateways=2) as at:
                await launched.gateway.until(is_up=True)
                assert (await at.post("/v1/completions", {"prompt": "x"})).status_code == 200
                while f'{prompts}{{gateway="gateway-0",tier="rt"}} 1.0' not in await metrics(at):
                    await asyncio.sleep(0.01)
                # What it said of itself is heard; the other one has measured the same, and a job as well.
                news = await heard.get()
                while b"gateway-1" not in (text := (await metrics(at)).encode()):
                    other.link.send(GatewayNews(InstanceId("gateway-1"), news.metrics, {}))
                    await asyncio.sleep(0.01)
                names = {line.split(b"{")[0] for line in text.splitlines() if b'gateway="gateway-1"' in line}
                assert {prompts.encode(), b"alignedserve:request_success_total"} <= names
                again = {line.split(b"{")[0] for line in text.splitlines() if b'gateway="gateway-0"' in line}
                assert names == again
                assert b"process_up{gateway" not in text, "what routers say is not this gateway's"
            other.link.stop()
            await running

    play(scenario)


@pytest.mark.slow
def test_what_an_islands_gateway_has_measured_is_its_hosts() -> None:
    """Prometheus asks each host."""

    async def scenario() -> None:
        async with launcher(gateways=2) as launched:
            island = island_gateway(0)
            launched.links.add(island, Seen())
            heard: asyncio.Queue[GatewayNews] = asyncio.Queue()
            others = [Other(launched.address, heard), Other(launched.address, asyncio.Queue(), island)]
            running = [asyncio.create_task(each.link.run()) for each in others]
            async with served(launcher=launched.address, num_gateways=2) as at:
                await launched.gateway.until(is_up=True)
                measured = (await heard.get()).metrics
                for metrics_of_island in (b"", measured):
                    others[1].link.send(GatewayNews(island, metrics_of_island, {}))
                    others[1].link.send(Attainment(1, 0, False))
                num_met = 0
                while num_met < 2:
                    num_met += launched.links.attained().num_met
                    await asyncio.sleep(0.01)
                # It comes after those.
                others[0].link.send(GatewayNews(InstanceId("gateway-1"), measured, {}))
                while 'gateway="gateway-1"' not in (text := await metrics(at)):
                    await asyncio.sleep(0.01)
                assert f'gateway="{island}"' not in text and launched.gateway.is_up
            for each in others:
                each.link.stop()
            await asyncio.gather(*running)

    play(scenario)


@pytest.mark.slow
def test_the_launcher_hears_what_became_of_objectives_and_says_how_many_islands_are_wanted() -> None:
    async def scenario() -> None:
        async with launcher() as launched, served(launcher=launched.address) as at:
            await launched.gateway.until(is_up=True)
            launched.links.attained()
            objectives = {"ttft_ms": 600_000, "tbt_ms": 60_000}
            for _ in range(2):
                body = {"prompt": "x", "slo": objectives}
                assert (await at.post("/v1/completions", body)).status_code == 200
            at.router.allow(0)
            body = {"prompt": "x", "slo": objectives | {"ttft_ms": 1}}
            asking = asyncio.create_task(at.post("/v1/completions", body))
            await at.router.until(lambda: len(at.router.submitted) == 3)
            await asyncio.sleep(0.001)
            at.router.allow(None)
            assert (await asking).status_code == 200
            num_met = num_missed = 0
            while (num_met, num_missed) != (5, 1):
                seen = launched.links.attained()
                num_met, num_missed = num_met + seen.num_met, num_missed + seen.num_missed
                assert num_met <= 5 and num_missed <= 1 and not seen.are_late
                await asyncio.sleep(0.01)
            assert "\nalignedserve:islands_wanted" not in await metrics(at)
            launched.links.tell({0: first_of(at)}, [], num_wanted=3)
            while "alignedserve:islands_wanted 3.0" not in await metrics(at):
                await asyncio.sleep(0.01)

    play(scenario)


@pytest.mark.slow
def test_a_gateway_says_nothing_in_the_name_of_another() -> None:
    async def scenario() -> None:
        async with launcher(gateways=2) as launched:
            other = Other(launched.address, asyncio.Queue())
            running = asyncio.create_task(other.link.run())
            await launched.others[0].until(is_up=True)
            other.link.send(GatewayNews(GATEWAY, b"", {}))
            await launched.others[0].until(is_up=False)
            other.link.stop()
            await running

    play(scenario)


async def metrics(at: Served) -> str:
    return (await at.http.get("/metrics")).text


class Other:
    """Another gateway, as far as the launcher knows."""

    def __init__(
        self,
        address: RouterAddress,
        heard: asyncio.Queue[GatewayNews],
        name: InstanceId = InstanceId("gateway-1"),  # noqa: B008
    ) -> None:
        hello = Hello("gateway", name, Epoch(1), 1, {}, InstanceLimits())
        self.link = RouterConnection(address, lambda: hello, self)
        self._heard = heard

    def on_up(self, welcome: Welcome) -> None:
        self.link.send(Attainment(0, 0, False))

    def on_down(self) -> None: ...

    def on_message(self, message: AnyMessage) -> None:
        if isinstance(message, GatewayNews):
            self._heard.put_nowait(message)
