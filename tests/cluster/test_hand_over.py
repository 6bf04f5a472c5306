"""Real time goes straight from the prefill process that computed its prompt to a decode process, token for token the
same; also when those die meanwhile."""

from __future__ import annotations

import pytest

from alignedserve.protocol.messages import Cluster
from tests.cluster.client import Client, Stream, all_ended
from tests.cluster.conftest import Scenes
from tests.cluster.processes import DECODES, PREFILLS


def num_handed_over(cluster: Cluster) -> int:
    return sum(each.stats.num_handed_over for each in cluster.processes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "link", [pytest.param(each, marks=pytest.mark.drawn(one_in=2)) for each in ("ipc", "gloo")]
)
def test_kv_is_pulled_from_where_it_was_computed(scenes: Scenes, link: str) -> None:
    scene = scenes(link=link)
    scene.kill_in_turn([PREFILLS[0], DECODES[0]])

    async def look(client: Client, streams: list[Stream]) -> None:
        before = await client.cluster()
        await client.until(lambda: all_ended(streams))
        assert num_handed_over(await client.cluster()) > num_handed_over(before)

    scene.play(look)
