"""A client goes away while its request is in a certain state, as the system itself reports it: a second later nothing
is left of it, in no process."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.engine.config import EngineConfig
from alignedserve.gateway.config import GatewayConfig, HttpConfig
from alignedserve.launch.ports import free_port
from alignedserve.types import InstanceId
from tests.cluster.processes import DECODES, MAX_MODEL_LEN, POOL, PREFILLS, ROUTER, Processes, Setup

GATEWAY = InstanceId("gateway-0")
FAMILY = "llama-gqa-tied"
# such that three of four have room in the pool, and one of two on a decode instance
PROMPT = [number % 50 for number in range(300)]
ASK_S = 0.02
# for processes to come up, and requests into their state
PATIENCE_S = 60.0
# what is promised
GONE_S = 1.0

Directory = Callable[[str], Path]
States = dict[str, int]


class House:
    """Processes, started when a test wants them, behind a gateway."""

    def __init__(self, processes: Processes, otlp_endpoint: str | None) -> None:
        setup = processes.setup
        self.processes = processes
        port = free_port("127.0.0.1")
        engine = EngineConfig(str(setup.directory), max_model_len=MAX_MODEL_LEN, skip_tokenizer_init=True)
        processes.configs[GATEWAY] = GatewayConfig(
            GATEWAY,
            (processes.router,),
            engine,
            "tiny",
            HttpConfig("127.0.0.1", port, otlp_endpoint=otlp_endpoint),
            log=setup.log,
        )
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)

    async def start(self, *names: InstanceId) -> None:
        """They are up when it returns."""
        self.processes.start(*names)
        await self._until(lambda cluster: set(names) <= _up(cluster))

    def ask(self, is_stream: bool, **options: Any) -> asyncio.Task[None]:
        """A client of its own, which goes away when it is cancelled."""
        body = {"prompt": PROMPT, "max_tokens": 80, "ignore_eos": True, "stream": is_stream, "logprobs": 0}
        return asyncio.create_task(self._ask(body | options))

    async def until(self, states: States) -> None:
        """Requests are in these states: so many in each."""
        await self._until(lambda cluster: cluster["requests"] == states)

    async def until_empty(self) -> None:
        await self._until(_is_empty)

    async def _ask(self, body: dict[str, Any]) -> None:
        async with (
            httpx.AsyncClient(base_url=self.http.base_url, timeout=PATIENCE_S) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for line in response.aiter_lines():
                assert "error" not in line, line
        raise AssertionError("it was answered before it could go away")

    async def _until(self, is_so: Callable[[dict[str, Any]], object]) -> None:
        deadline, found = time.monotonic() + PATIENCE_S, None
        while found is None or not is_so(found):
            assert time.monotonic() < deadline, found
            await asyncio.sleep(ASK_S)
            found = await self._cluster()

    async def _cluster(self) -> dict[str, Any] | None:
        """None while the gateway, or the router, is not up yet."""
        try:
            answer = await self.http.get("/v1/cluster")
        except httpx.ConnectError:
            return None
        found: dict[str, Any] = answer.json()
        return found if answer.status_code == 200 else None


def _up(cluster: dict[str, Any]) -> set[InstanceId]:
    return {InstanceId(each["instance_id"]) for each in cluster["processes"] if each["state"] == "up"}


def _is_empty(cluster: dict[str, Any]) -> bool:
    used = [each["blocks"]["used"] for each in cluster["processes"] if each["state"] == "up"]
    return not cluster["requests"] and not any(used)


@pytest.fixture
def houses(tiny_model: Directory, tmp_path: Path) -> Iterator[Callable[..., Processes]]:
    made: list[Processes] = []

    def make(**options: Any) -> Processes:
        made.append(Processes(Setup(tiny_model(FAMILY), is_slow=True, **options), tmp_path))
        return made[-1]

    yield make
    for processes in made:
        processes.clean_up()


@asynccontextmanager
async def opened(
    processes: Processes, *names: InstanceId, otlp_endpoint: str | None = None
) -> AsyncIterator[House]:
    """With these, and all that there has to be. At the end they stop by themselves."""
    house = House(processes, otlp_endpoint)
    async with house.http:
        await house.start(ROUTER, POOL, GATEWAY, *names)
        yield house
    await asyncio.to_thread(processes.stop)


async def check_gone(house: House, asking: asyncio.Task[None]) -> None:
    """The client hangs up: everything that was held for it is free."""
    assert not asking.done(), asking
    asking.cancel()
    left_s = time.monotonic()
    await house.until_empty()
    took_s = time.monotonic() - left_s
    print(f"nothing left after {took_s:.2f} s")
    assert took_s < GONE_S
    with pytest.raises(asyncio.CancelledError):
        await asking


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within_time() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            await scenario()

    asyncio.run(within_time())


WAYS = {
    "stream": ({"is_stream": True}, 1),
    "whole": ({"is_stream": False}, 1),
    "stream of two": ({"is_stream": True, "n": 2}, 2),
    "best of two": ({"is_stream": False, "best_of": 2}, 2),
}


def ways(quick: str) -> pytest.MarkDecorator:
    """All of them; `make test` has this one."""
    return pytest.mark.parametrize(
        ("way", "num"),
        [
            pytest.param(*each, id=name, marks=() if name == quick else pytest.mark.slow)
            for name, each in WAYS.items()
        ],
    )


@ways("stream of two")
def test_in_the_queue(houses: Callable[..., Processes], way: dict[str, Any], num: int) -> None:
    async def scenario() -> None:
        async with opened(houses(), DECODES[0]) as house:
            asking = house.ask(**way)
            await house.until({"queued": num})
            await check_gone(house, asking)

    play(scenario)


@ways("whole")
def test_in_prefill(houses: Callable[..., Processes], way: dict[str, Any], num: int) -> None:
    async def scenario() -> None:
        async with opened(houses(), PREFILLS[0], DECODES[0]) as house:
            asking = house.ask(**way)
            await house.until({"prefilling": num})
            await check_gone(house, asking)

    play(scenario)


@ways("stream")
def test_in_the_pool(houses: Callable[..., Processes], way: dict[str, Any], num: int) -> None:
    async def scenario() -> None:
        async with opened(houses(), PREFILLS[0]) as house:
            asking = house.ask(**way)
            await house.until({"pooled": num})
            await check_gone(house, asking)

    play(scenario)


@pytest.mark.parametrize(
    "is_stream", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["stream", "best of four"]
)
def test_where_the_pool_is_full(houses: Callable[..., Processes], is_stream: bool) -> None:
    async def scenario() -> None:
        async with opened(houses(), PREFILLS[0]) as house:
            asking = house.ask(is_stream, n=4) if is_stream else house.ask(is_stream, best_of=4)
            await house.until({"pooled": 3, "queued": 1})
            await check_gone(house, asking)

    play(scenario)


@ways("best of two")
def test_on_the_way_into_a_prefill_instances_buffer(
    houses: Callable[..., Processes], way: dict[str, Any], num: int
) -> None:
    async def scenario() -> None:
        # While it stands still the prefill instance is not to be taken for dead, however long the others take to start.
        async with opened(houses(link="gloo", silence_s=2 * PATIENCE_S), PREFILLS[0]) as house:
            # the buffer has room for two of these
            asking = house.ask(**way, prompt=PROMPT[:150])
            await house.until({"pooled": num})
            # its copy would be over before anyone could look
            house.processes.signal(PREFILLS[0], signal.SIGSTOP)
            await house.start(DECODES[0])
            await house.until({"staged": num})
            house.processes.signal(PREFILLS[0], signal.SIGCONT)
            await check_gone(house, asking)

    play(scenario)


@pytest.mark.parametrize("link", ["gloo", pytest.param("host", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "is_stream", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["stream", "best of two"]
)
def test_staged_for_a_decode_instance_that_is_full(
    houses: Callable[..., Processes], link: str, is_stream: bool
) -> None:
    """There is room for one of two: one runs, the other is a candidate."""

    async def scenario() -> None:
        async with opened(houses(link=link), PREFILLS[0], DECODES[0]) as house:
            asking = house.ask(is_stream, n=2) if is_stream else house.ask(is_stream, best_of=2)
            await house.until({"running": 1, "offered": 1})
            await check_gone(house, asking)

    play(scenario)


@pytest.mark.parametrize("link", ["gloo", "host"])
@ways("stream")
def test_running(houses: Callable[..., Processes], way: dict[str, Any], num: int, link: str) -> None:
    async def scenario() -> None:
        async with opened(houses(link=link), PREFILLS[0], *DECODES) as house:
            asking = house.ask(**way)
            await house.until({"running": num})
            await check_gone(house, asking)

    play(scenario)


STORIES = {
    "queued": ["queue"],
    "prefilling": ["queue", "prefill"],
    "pooled": ["queue", "prefill", "pool"],
    "running": ["queue", "prefill", "pool", "admit", "decode"],
}


@pytest.mark.parametrize(
    "state",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in STORIES if each != "running"), "running"],
)
def test_its_trace_ends_with_the_stage_that_it_was_left_in(
    houses: Callable[..., Processes], state: str
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from tests.gateway.telemetry.test_traces import receiving

    present = {"queued": (), "prefilling": PREFILLS[:1], "pooled": PREFILLS[:1]}

    async def scenario() -> None:
        names = present.get(state, (PREFILLS[0], DECODES[0]))
        async with opened(houses(), *names, otlp_endpoint=endpoint) as house:
            asking = house.ask(is_stream=True)
            await house.until({state: 1})
            await check_gone(house, asking)

    with receiving() as (endpoint, spans):
        play(scenario)
    (whole,) = (span for span in spans if span.name == "request")
    parts = sorted(
        (span for span in spans if span.parent_span_id == whole.span_id),
        key=lambda span: span.start_time_unix_nano,
    )
    assert [span.name for span in parts] == STORIES[state]
    assert parts[-1].end_time_unix_nano == whole.end_time_unix_nano
