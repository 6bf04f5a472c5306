"""Processes killed, or stopped, in mid-stream: the streams go on, token for token the same, and nothing is left."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

import pytest

from alignedserve.types import InstanceId
from tests.cluster.client import Client, Stream, all_ended
from tests.cluster.conftest import Scenes
from tests.cluster.processes import DECODES, POOL, PREFILLS, ROUTER
from tests.cluster.scene import NUM_EARLY, NUM_REQUESTS

AT_DECODE = {"offered", "running", "making room", "evicting"}
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
# In every run: each kind of process, and each link. That of `make test` is without the marker. `vopr` shows in virtual
# time what follows from the order of deaths.
ALWAYS = {
    ("host", (POOL, ROUTER)): [],
    ("gloo", (PREFILLS[0],)): [pytest.mark.slow],
    ("ipc", (DECODES[1], DECODES[0])): [pytest.mark.slow],
}
DRAWN = [pytest.mark.slow, pytest.mark.drawn(one_in=14)]
CASES = [
    pytest.param(
        link, victims, marks=ALWAYS.get((link, victims), DRAWN), id=f"{link}-{'-then-'.join(victims)}"
    )
    for link in LINKS
    for victims in DEATHS
]


@pytest.mark.slow
@pytest.mark.parametrize(("link", "victims"), CASES)
def test_killed_in_mid_stream(scenes: Scenes, link: str, victims: Sequence[InstanceId]) -> None:
    scenes(link=link).kill_in_turn(victims)


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim",
    [pytest.param(each, marks=pytest.mark.drawn(one_in=3)) for each in (PREFILLS[0], DECODES[0], POOL)],
)
def test_who_hangs_is_killed_and_the_streams_go_on(scenes: Scenes, victim: InstanceId) -> None:
    scene = scenes(link="gloo", silence_s=2.0)

    async def stop(client: Client, streams: list[Stream]) -> None:
        await client.until(lambda: client.num_tokens >= NUM_EARLY * NUM_REQUESTS)
        assert not all_ended(streams)
        scene.processes.signal(victim, signal.SIGSTOP)
        exit_code = await asyncio.to_thread(scene.processes.join, victim)
        assert exit_code == -signal.SIGKILL
        scene.processes.start(victim)

    scene.play(stop)


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
def test_transfers_from_who_hangs_are_given_up_at_their_deadline(scenes: Scenes) -> None:
    scene = scenes(link="gloo", silence_s=100.0, timeout_s=1.0)

    async def stop(client: Client, streams: list[Stream]) -> None:
        await client.until(lambda: client.num_tokens >= NUM_EARLY * NUM_REQUESTS)
        for name in PREFILLS:
            scene.processes.signal(name, signal.SIGSTOP)
        # What ran has ended; what could not be pulled was called back from those that hang, and waits for them.
        await client.until_cluster(
            lambda cluster: "leaving" in cluster.requests and not AT_DECODE & cluster.requests.keys()
        )
        for name in PREFILLS:
            scene.processes.signal(name, signal.SIGCONT)

    scene.play(stop)
    failures = scene.history().failures
    assert "pull" in {failed.what for failed in failures}
