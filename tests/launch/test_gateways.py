"""Two gateways at one port, and several models: connections are spread, a gateway that dies costs its own and no other,
answers with adapters are the engine's own, and all processes can be replaced under load."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from alignedserve import demo
from tests.launch import streams
from tests.launch.batch_job import check_answers, client_of, num_completed, submit
from tests.launch.batch_job import until as until_batch
from tests.launch.restarting import check_restart, command_of
from tests.launch.server import EXACT, NO_TLS, POOL, START_S, Server, serving, until
from tests.launch.streams import QUESTIONS, SETTINGS, engine_alone
from tests.tiny_adapters import write_adapter

GATEWAYS = ("gateway-0", "gateway-1")
NUM_LINES = 60
# All streams of a round are at one gateway once in 128 rounds.
MAX_ROUNDS = 10
MODELS = ("demo", "one", "two")

# In other runs test_serve.py has a restart.
pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=2, turn=0, alone=True)]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The adapters, as `--lora-modules` has them."""
    to = tmp_path_factory.mktemp("adapters")
    paths = [write_adapter(to / name, demo.MODEL_DIR, seed) for seed, name in enumerate(MODELS[1:])]
    return tuple(f"{name}={path}" for name, path in zip(MODELS[1:], paths, strict=True))


@pytest.fixture(scope="module")
def server(modules: tuple[str, ...]) -> Iterator[Server]:
    with serving("--gateways", "2", *EXACT, *POOL, "--lora-modules", *modules) as found:
        yield found


@dataclass
class Stream:
    """A stream over a connection of its own."""

    number: int
    # This end's port.
    port: int = 0
    text: str = ""
    is_whole: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, url: str) -> None:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": QUESTIONS[self.number]}],
            "stream": True,
            "seed": 7,
            **SETTINGS[self.number],
        }
        try:
            async with (
                httpx2.AsyncClient(timeout=170, verify=NO_TLS) as client,
                client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
            ):
                self.port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
                async for line in answer.aiter_lines():
                    self._line(line)
        except httpx2.TransportError:
            assert not self.is_whole

    def _line(self, line: str) -> None:
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.is_whole = True
        elif data:
            self.text += json.loads(data)["choices"][0]["delta"].get("content") or ""
            if len(self.text) > 20:
                self.begun.set()


def ports_at(pid: int) -> set[int]:
    """The ports at the other ends of a process's connections."""
    inodes = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        # A stream may end meanwhile.
        with suppress(FileNotFoundError):
            if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry.path)):
                inodes.add(found[1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[2].split(":")[1], 16) for row in rows if row[9] in inodes}


async def ask_all(url: str, in_the_middle: Callable[[list[Stream]], None]) -> list[Stream]:
    streams = [Stream(number) for number in range(len(QUESTIONS))]
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())
        for stream in streams:
            group.create_task(stream.ask(url))
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
        await asyncio.to_thread(in_the_middle, streams)
    return streams


def test_a_gateway_that_dies_costs_only_its_own_connections(server: Server) -> None:
    client = client_of(server)
    job = submit(client, NUM_LINES)
    killed: list[int] = []
    # The streams at the one that is killed, and, if these are the same, those that did not end.
    there: set[int] = set()
    lost: set[int] = set()

    def kill_one(streams: list[Stream]) -> None:
        pid = server.until_up("gateway-0", killed)
        ports = ports_at(pid)
        there.update(stream.number for stream in streams if stream.port in ports)
        # All may happen to be at one of them: there is nothing to tell apart.
        if 0 < len(there) < len(streams):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            # The port is served all the same.
            assert all(server.get("/v1/models").status_code == 200 for _ in range(20))

    # On a busy machine all of a stream may have been sent to this client before its gateway is killed. That does not
    # happen to one of them in each round: where each round spares one, streams outlive their gateway.
    for _ in range(MAX_ROUNDS):
        there.clear()
        streams = asyncio.run(ask_all(server.url, kill_one))
        cut = {stream.number for stream in streams if not stream.is_whole}
        assert cut <= there
        lost = cut if cut == there else set()
        for stream, right in zip(streams, engine_alone(), strict=True):
            assert right.startswith(stream.text)
            assert stream.text == right or not stream.is_whole
        if lost:
            break
    assert lost, (
        f"in none of {MAX_ROUNDS} rounds all streams were cut; a gateway was killed in {len(killed)} of them"
    )

    assert server.until_up("gateway-0", killed)
    until_batch(client, job, lambda batch: num_completed(batch) == NUM_LINES)
    check_answers(client, job, NUM_LINES)
    streams = asyncio.run(ask_all(server.url, lambda streams: None))
    assert [stream.text for stream in streams] == engine_alone()
    check_metrics(server)


def check_metrics(server: Server) -> None:
    """Whichever is asked, it knows of both: the second one has counted since the start, and the first one since it was
    started again."""
    pattern = re.compile(
        r'^alignedserve:generation_tokens_total\{gateway="(.*)",tier="rt"\} (.*)$', re.MULTILINE
    )
    total = sum(len(text) > 0 for text in engine_alone()) * SETTINGS[0]["max_tokens"]

    # What another gateway has measured is a second old at most.
    def knows_of_both() -> bool:
        counts = {name: float(count) for name, count in pattern.findall(server.get("/metrics").text)}
        return set(counts) == set(GATEWAYS) and sum(counts.values()) >= total

    until(knows_of_both)


def test_streams_of_several_models_are_the_engines_own(server: Server, modules: tuple[str, ...]) -> None:
    expected = engine_alone(lora_modules=modules, models=MODELS)
    # Every answer with an adapter is another one.
    assert [ours == plain for ours, plain in zip(expected, engine_alone(), strict=True)] == [
        number % 3 == 0 for number in range(len(expected))
    ]
    listed = server.get("/v1/models").json()["data"]
    assert [(each["id"], each.get("parent")) for each in listed] == [
        *(("demo", None), ("one", "demo"), ("two", "demo"))
    ]
    texts, _ = streams.ask_all(server.url, lambda: server.kill(["prefill-0", "decode-0"]), models=MODELS)
    assert texts == expected
    server.until_whole()
    assert streams.ask_all(server.url, models=MODELS)[0] == expected


def test_every_process_is_another_one_and_nobody_has_noticed(server: Server) -> None:
    check_restart(server, [*GATEWAYS])
    server.until_whole()


def test_a_restart_is_one_at_a_time_and_ends_with_the_system(server: Server) -> None:
    """The last one that the server is there for."""
    with subprocess.Popen(
        command_of(server), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout and first.stderr
        # Those that came are no others than the first were.
        assert first.stdout.readline().startswith("prefill-0")
        second = subprocess.run(command_of(server), capture_output=True, text=True, timeout=START_S)
        assert second.returncode == 1 and "another restart is under way" in second.stdout
        server.signal(signal.SIGTERM)
        assert "the system is stopping" in first.stdout.read()
        assert "not all processes were replaced" in first.stderr.read()
    assert first.returncode == 1
    assert server.wait() == 0, server.output
