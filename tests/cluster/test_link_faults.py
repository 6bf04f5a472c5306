"""The links of an island of real processes fail for a while: KV goes through host memory meanwhile, token for token the
same, and over the links again afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from alignedserve.process.logs import LogConfig
from alignedserve.protocol.messages import Cluster
from alignedserve.types import InstanceId
from tests.cluster.client import TIMEOUT_S, Client, Stream, all_ended
from tests.cluster.part import LINKS_FAIL
from tests.cluster.processes import Setup, running
from tests.cluster.scene import Scene


def over_host(cluster: Cluster) -> list[tuple[InstanceId, InstanceId]]:
    return [(to, each.instance_id) for each in cluster.processes for to in each.stats.over_host]


def num_failed(cluster: Cluster) -> int:
    return sum(each.stats.num_failed_pulls for each in cluster.processes)


def num_pulled_bytes(cluster: Cluster) -> int:
    moved = (each for process in cluster.processes for each in process.stats.moved)
    return sum(each.num_bytes for each in moved if each.what == "pull")


@pytest.mark.slow
def test_links_fail_and_come_back(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    logs, events = tmp_path / "logs", tmp_path / "events"
    setup = Setup(
        tiny_model("llama-gqa-tied"), link="ipc", has_failing_links=True, log=LogConfig(dir=str(logs))
    )
    seen: list[Cluster] = []

    async def look_at_the_end(client: Client, streams: list[Stream]) -> None:
        await client.until(lambda: all_ended(streams))
        seen.append(await client.cluster())

    with running(setup, events) as processes:
        scene = Scene(processes)
        scene.play(look_at_the_end)
        (before,) = seen
        assert num_pulled_bytes(before) and not num_failed(before) and not over_host(before)

        (logs / LINKS_FAIL).touch()
        scene.play(look_at_the_end)
        assert over_host(seen[-1]) and num_failed(seen[-1]) >= 2
        assert num_pulled_bytes(seen[-1]) == num_pulled_bytes(before)

        (logs / LINKS_FAIL).unlink()
        deadline_s = time.monotonic() + TIMEOUT_S
        while over_host(seen[-1]):
            assert time.monotonic() < deadline_s, seen[-1]
            scene.play(look_at_the_end)
        assert num_pulled_bytes(seen[-1]) > num_pulled_bytes(before)
    said = (logs / "router.log").read_text()
    assert (
        "through host memory: 2 pulls over the link failed in a row" in said and "over the link again" in said
    )
