"""Instances that take another role all the time, and are killed meanwhile: the streams stay the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from alignedserve.types import InstanceId
from tests.cluster.client import Client, Stream
from tests.cluster.processes import DECODES, POOL, PREFILLS, ROUTER, Setup, running
from tests.cluster.scene import Scene

Directory = Callable[[str], Path]
FAMILY = "llama-gqa-tied"


async def until_changed(scene: Scene, client: Client, streams: list[Stream], num_changes: int) -> None:
    """Until so many more instances have taken another role, with streams open all the time."""
    first = await count(client)
    while await count(client) < first + num_changes:
        await scene.until_mid_stream(client, streams)


async def count(client: Client) -> int:
    cluster = await client.until_cluster(lambda cluster: True)
    return sum(cluster.role_changes.values())


@pytest.mark.parametrize("link", ["host", "ipc", pytest.param("gloo", marks=pytest.mark.slow)])
def test_roles_change_under_streams(tiny_model: Directory, tmp_path: Path, link: str) -> None:
    with running(Setup(tiny_model(FAMILY), link=link, changes_roles=True), tmp_path) as processes:
        scene = Scene(processes)

        async def change(client: Client, streams: list[Stream]) -> None:
            await until_changed(scene, client, streams, 6)

        scene.play(change)


@pytest.mark.parametrize(
    "victims",
    [
        (PREFILLS[0], DECODES[0]),
        (DECODES[1], ROUTER),
        pytest.param((POOL, PREFILLS[1]), marks=pytest.mark.slow),
        pytest.param((ROUTER, POOL, DECODES[0]), marks=pytest.mark.slow),
    ],
    ids="-then-".join,
)
def test_killed_while_roles_change(
    tiny_model: Directory, tmp_path: Path, victims: Sequence[InstanceId]
) -> None:
    with running(Setup(tiny_model(FAMILY), link="ipc", changes_roles=True), tmp_path) as processes:
        scene = Scene(processes)

        async def kill(client: Client, streams: list[Stream]) -> None:
            for victim in victims:
                await until_changed(scene, client, streams, 1)
                processes.kill(victim)
                processes.start(victim)
            await until_changed(scene, client, streams, 1)

        scene.play(kill)
