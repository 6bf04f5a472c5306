"""A pool that keeps KV as int8, with real processes: tokens may differ, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from alignedserve.kvpool.process import segments
from alignedserve.kvpool.segment import Segment
from alignedserve.types import InstanceId
from tests.cluster.client import Client, Stream, connected
from tests.cluster.history import History
from tests.cluster.processes import COLOCATED, DECODES, POOL, Setup, running
from tests.cluster.requests import alone, known_requests
from tests.cluster.scene import Scene

Directory = Callable[[str], Path]
FAMILY = "llama-gqa-tied"


class Int8Scene(Scene):
    def check(self, streams: Sequence[Stream]) -> None:
        assert [len(stream.tokens) for stream in streams] == [len(each.tokens) for each in self.expected]
        assert {stream.finish_reason for stream in streams} == {"length"}


@pytest.fixture(scope="module")
def scenes(tiny_model: Directory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Scene]]:
    """Each started once."""
    made: dict[Setup, Scene] = {}
    with ExitStack() as stack:

        def scene(**options: object) -> Scene:
            setup = Setup(tiny_model(FAMILY), pool_kv_dtype="int8", **options)  # type: ignore[arg-type]
            if setup not in made:
                made[setup] = Int8Scene(
                    stack.enter_context(running(setup, tmp_path_factory.mktemp("events")))
                )
            return made[setup]

        yield scene


@pytest.mark.parametrize("options", [{"link": "host"}, {"link": "ipc"}, {"num_colocated": 1}])
def test_streams_are_complete_and_nothing_is_left(
    scenes: Callable[..., Scene], options: dict[str, object]
) -> None:
    scene = scenes(**options)

    async def nothing(client: Client, streams: list[Stream]) -> None:
        pass

    scene.play(nothing)
    (name,) = segments(scene.processes.segment_prefix)
    segment = Segment.attach(name)
    assert segment.form.encoding == "kv-int8" and segment.blocks.any()
    segment.close()
    # what a colocated instance has in the pool is what it had to evict
    assert History(scene.processes.logs).evicted[COLOCATED if "num_colocated" in options else DECODES[0]]


def test_answers_are_close_to_the_engine_s(scenes: Callable[..., Scene]) -> None:
    """The first token was computed before any KV was in the pool. The later ones stand on KV that is nearly right: of
    a random model, whose logits are close together, most are the same."""
    processes = scenes(link="host").processes
    requests = known_requests()

    async def generate() -> list[Stream]:
        async with connected(processes) as client:
            return await client.generate(requests, at_once=4, every=20)

    streams = asyncio.run(generate())
    expected = [result.tokens for result in alone(processes.setup.directory, requests)]
    assert [stream.tokens[0] for stream in streams] == [tokens[0] for tokens in expected]
    pairs = [
        pair
        for stream, tokens in zip(streams, expected, strict=True)
        for pair in zip(stream.tokens, tokens, strict=True)
    ]
    assert sum(ours == theirs for ours, theirs in pairs) > 0.5 * len(pairs)


@pytest.mark.parametrize(
    ("options", "victims"),
    [
        ({"link": "host"}, (DECODES[0],)),
        ({"link": "host"}, (POOL, DECODES[1])),
        ({"num_colocated": 1}, (COLOCATED,)),
    ],
)
def test_streams_go_on_when_processes_are_killed(
    scenes: Callable[..., Scene], options: dict[str, object], victims: Sequence[InstanceId]
) -> None:
    scenes(**options).kill_in_turn(victims)
