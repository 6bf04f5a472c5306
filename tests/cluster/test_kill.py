"""Processes killed, or stopped, in mid-stream: the streams go on, token for token the same, and nothing is left."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from alignedserve.types import InstanceId
from tests.cluster.client import Client, Stream, all_ended
from tests.cluster.history import History
from tests.cluster.processes import DECODES, POOL, PREFILLS, ROUTER, Setup, running
from tests.cluster.scene import NUM_EARLY, NUM_REQUESTS, Scene

Directory = Callable[[str], Path]
FAMILY = "llama-gqa-tied"
AT_DECODE = {"offered", "running", "making room", "evicting"}


@pytest.fixture(scope="module")
def scenes(tiny_model: Directory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Scene]]:
    """Each started once."""
    made: dict[Setup, Scene] = {}
    with ExitStack() as stack:

        def scene(**options: object) -> Scene:
            setup = Setup(tiny_model(FAMILY), **options)  # type: ignore[arg-type]
            if setup not in made:
                made[setup] = Scene(stack.enter_context(running(setup, tmp_path_factory.mktemp("events"))))
            return made[setup]

        yield scene


LINKS = ("host", "gloo", "ipc")
DEATHS = (
    (DECODES[0],),
    (PREFILLS[0],),
    (POOL,),
    (ROUTER,),
    (DECODES[0], PREFILLS[1]),
    (DECODES[1], DECODES[0]),
    (PREFILLS[1], POOL),
    (POOL, ROUTER),
    (ROUTER, DECODES[1]),
    (DECODES[0], POOL, DECODES[0]),
)
# those of `make test`, with every kind of process at two links
QUICK = {
    ("host", (DECODES[0], PREFILLS[1])),
    ("host", (POOL, ROUTER)),
    ("ipc", (PREFILLS[0],)),
    ("ipc", (ROUTER, DECODES[1])),
}
CASES = [
    pytest.param(
        link,
        victims,
        marks=() if (link, victims) in QUICK else pytest.mark.slow,
        id=f"{link}-{'-then-'.join(victims)}",
    )
    for victims in DEATHS
    for link in LINKS
]


@pytest.mark.parametrize(("link", "victims"), CASES)
def test_killed_in_mid_stream(scenes: Callable[..., Scene], link: str, victims: Sequence[InstanceId]) -> None:
    scenes(link=link).kill_in_turn(victims)


@pytest.mark.parametrize(
    "victim", [*(pytest.param(each, marks=pytest.mark.slow) for each in (DECODES[0], PREFILLS[0])), POOL]
)
def test_who_hangs_is_killed_and_the_streams_go_on(scenes: Callable[..., Scene], victim: InstanceId) -> None:
    scene = scenes(link="gloo", silence_s=3.0)

    async def stop(client: Client, streams: list[Stream]) -> None:
        await client.until(lambda: client.num_tokens >= NUM_EARLY * NUM_REQUESTS)
        assert not all_ended(streams)
        scene.processes.signal(victim, signal.SIGSTOP)
        exit_code = await asyncio.to_thread(scene.processes.join, victim)
        assert exit_code == -signal.SIGKILL
        scene.processes.start(victim)

    scene.play(stop)


@pytest.mark.slow
def test_transfers_from_who_hangs_are_given_up_at_their_deadline(scenes: Callable[..., Scene]) -> None:
    scene = scenes(link="gloo", silence_s=100.0, timeout_s=1.0)

    async def stop(client: Client, streams: list[Stream]) -> None:
        await client.until(lambda: client.num_tokens >= NUM_EARLY * NUM_REQUESTS)
        for name in PREFILLS:
            scene.processes.signal(name, signal.SIGSTOP)
        # what ran has ended; what could not be pulled was called back from those who hang, and waits for them
        await client.until_cluster(
            lambda cluster: "leaving" in cluster.requests and not AT_DECODE & cluster.requests.keys()
        )
        for name in PREFILLS:
            scene.processes.signal(name, signal.SIGCONT)

    scene.play(stop)
    failures = History(scene.processes.logs).failures
    assert "pull" in {failed.what for failed in failures}
