"""Real time goes straight from the prefill process that computed its prompt to a decode process, token for token the
same; also when those die meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from alignedserve.protocol.messages import Cluster
from tests.cluster.client import Client, Stream, all_ended
from tests.cluster.processes import DECODES, PREFILLS, Setup, running
from tests.cluster.scene import Scene


def num_handed_over(cluster: Cluster) -> int:
    return sum(each.stats.num_handed_over for each in cluster.processes)


@pytest.mark.parametrize("link", ["ipc", "gloo"])
def test_kv_is_pulled_from_where_it_was_computed(
    link: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    seen: list[Cluster] = []

    async def look_at_the_end(client: Client, streams: list[Stream]) -> None:
        await client.until(lambda: all_ended(streams))
        seen.append(await client.cluster())

    setup = Setup(tiny_model("llama-gqa-tied"), link=link)
    with running(setup, tmp_path / "events") as processes:
        scene = Scene(processes)
        scene.play(look_at_the_end)
        assert num_handed_over(seen[-1]) > 0
        scene.kill_in_turn([PREFILLS[0], DECODES[0]])
        scene.play(look_at_the_end)
        assert num_handed_over(seen[-1]) > num_handed_over(seen[0])
