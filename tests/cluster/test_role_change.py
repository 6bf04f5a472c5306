"""Instances that take another role all the time, and are killed meanwhile: the streams stay the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from alignedserve.types import InstanceId
from tests.cluster.client import TIMEOUT_S, Client, Stream
from tests.cluster.conftest import Scenes
from tests.cluster.processes import DECODES, POOL, PREFILLS, ROUTER
from tests.cluster.scene import Scene


async def until_changed(scene: Scene, client: Client, streams: list[Stream], num_changes: int) -> None:
    """Until this number of further instances have taken another role, with streams open all the time. Raises
    TimeoutError if none does for a long time."""
    num_seen = await count(client)
    for number in range(num_seen + 1, num_seen + num_changes + 1):
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while await count(client) < number:
                    await scene.until_mid_stream(client, streams)
        except TimeoutError as error:
            raise TimeoutError(f"{number - num_seen - 1} of {num_changes} roles have changed") from error


async def count(client: Client) -> int:
    cluster = await client.until_cluster(lambda cluster: True)
    return sum(cluster.role_changes.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "link",
    [pytest.param(each, marks=pytest.mark.drawn(one_in=3)) for each in ("host", "ipc", "gloo")],
)
def test_roles_change_under_streams(scenes: Scenes, link: str) -> None:
    scene = scenes(link=link, changes_roles=True)

    async def change(client: Client, streams: list[Stream]) -> None:
        await until_changed(scene, client, streams, num_changes=6)

    scene.play(change)


@pytest.mark.slow
@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(each, marks=pytest.mark.drawn(one_in=2))
        for each in (
            (DECODES[1], ROUTER),
            (POOL, PREFILLS[1]),
            (PREFILLS[0], DECODES[0]),
            (ROUTER, POOL, DECODES[0]),
        )
    ],
    ids="-then-".join,
)
def test_killed_while_roles_change(scenes: Scenes, victims: Sequence[InstanceId]) -> None:
    scene = scenes(link="ipc", changes_roles=True)

    async def kill(client: Client, streams: list[Stream]) -> None:
        for victim in victims:
            await until_changed(scene, client, streams, num_changes=1)
            scene.processes.kill(victim)
            scene.processes.start(victim)
        await until_changed(scene, client, streams, num_changes=1)

    scene.play(kill)
