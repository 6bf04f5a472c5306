"""Islands are requested from Ray's autoscaler and returned to it: its own fake one, with raylets here as nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from alignedserve.launch.leftovers import descendants
from tests.launch import own_ray
from tests.launch.server import EXACT, POOL, START_S, Server, serving, until
from tests.launch.streams import ask_all, engine_alone

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=8, turn=3, alone=True)]


@dataclass
class Autoscaler:
    address: str
    pid: int

    @property
    def num_nodes(self) -> int:
        """Raylets beside the head's."""
        names = [Path(f"/proc/{pid}/comm") for pid in dict(descendants(self.pid))]
        return sum(path.exists() and path.read_text().strip() == "raylet" for path in names) - 1


@pytest.fixture
def autoscaler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Autoscaler]:
    with own_ray.running("tests.launch.ray_autoscaler", monkeypatch) as process:
        assert process.stdout
        yield Autoscaler(process.stdout.readline().strip(), process.pid)


# All chats miss the default objective for the first token; there is none for those after it.
OPTIONS = (
    *("--min-islands", "1", "--max-islands", "2", *EXACT, *POOL),
    *("--slo-ttft-ms", "1", "--slo-tbt-ms", "0", "--cost-profile", "none"),
)
PATIENT = {"ttft_ms": 600_000}


def test_misses_bring_an_island_which_is_given_back_without_a_wrong_token(autoscaler: Autoscaler) -> None:
    with serving("--address", autoscaler.address, *OPTIONS, program="tests.launch.quick_growth") as server:
        # Beside much else Ray starts a node too many at times, and removes it again.
        miss_until(server, "^node-1/router is up after")
        for name in ("kvpool-0", "prefill-0", "decode-0"):
            server.until_said(f"^node-1/{name} is up after")
        assert autoscaler.num_nodes >= 2

        # Streams go on while one is given back, as soon as the two have been calm for long enough.
        deadline = time.monotonic() + START_S
        while not any("node-1 gets no more requests" in line for line in server.lines):
            assert time.monotonic() < deadline, server.output
            texts, _ = ask_all(server.url, slo=PATIENT)
            assert texts == engine_alone()
        server.until_said("^node-1 is given back$")
        until(lambda: {each["island"] for each in server.processes()} == {0})
        until(lambda: autoscaler.num_nodes == 1)
        texts, _ = ask_all(server.url, slo=PATIENT)
        assert texts == engine_alone()
        assert server.get("/health").json() == {"status": "ok"}
    # Nothing is asked for any more.
    until(lambda: autoscaler.num_nodes == 0)


def miss_until(server: Server, pattern: str) -> None:
    """Asks for a token at a time, each of which comes too late, until that is said."""
    is_said = threading.Event()

    def ask() -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
            while not is_said.is_set():
                client.completions.create(model="demo", prompt="x", max_tokens=1)

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            server.until_said(pattern)
        finally:
            is_said.set()
        for each in asking:
            each.result()
