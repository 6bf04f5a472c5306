"""Colocated instances as processes: the engine's own tokens, whatever is preempted, shared or killed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Request
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.policies import POLICIES
from alignedserve.types import InstanceId
from tests.cluster.client import Client, Stream, all_ended, connected
from tests.cluster.conftest import Scenes
from tests.cluster.processes import COLOCATED, POOL, ROUTER
from tests.cluster.requests import (
    alone,
    greedy_requests,
    known_requests,
    make_request,
    results,
    sampled_requests,
)
from tests.cluster.scene import NUM_EARLY, NUM_REQUESTS
from tests.scheduling import dropping
from tests.tiny_models import greedy

pytestmark = pytest.mark.slow


def in_classes(asked: Sequence[Request]) -> list[Request]:
    """In turn real time with objectives, best effort, and real time without."""
    ways: list[dict[str, Any]] = [{"ttft_s": 2.0, "tbt_s": 0.5}, {"tier": "be"}, {}]
    return [replace(each, **ways[number % len(ways)]) for number, each in enumerate(asked)]


# All policies run in the simulator, in `vopr` and in `LLM` too.
OTHERS = [name for name in POLICIES if name != "aligned"]
some_policies = pytest.mark.parametrize(
    "policy",
    ["aligned", *(pytest.param(name, marks=pytest.mark.drawn(one_in=2 * len(OTHERS))) for name in OTHERS)],
)


@some_policies
def test_tokens_are_transformers_and_the_engines_whoever_is_killed(scenes: Scenes, policy: str) -> None:
    scene = scenes(num_colocated=1, policy=policy)
    directory, known = scene.processes.setup.directory, known_requests()
    more = [*greedy_requests(24, seed=1), *sampled_requests(24, seed=2)]
    logged = [
        make_request([(7 * number + place) % 150 for place in range(200)], params)
        for number, params in enumerate(
            [SamplingParams(prompt_logprobs=2, max_tokens=8, ignore_eos=True)] * 3
        )
    ]

    async def generate() -> list[Stream]:
        async with connected(scene.processes) as client:
            asked = in_classes([*more[:20], *known, *logged, *more[20:]])
            return await client.generate(asked, at_once=12, every=40)

    streams = asyncio.run(generate())
    assert [stream.tokens for stream in streams[20 : 20 + len(known)]] == greedy(directory)
    assert results(streams) == alone(directory, [stream.request for stream in streams])
    history = scene.history()
    assert history.evicted[COLOCATED] > 3 and history.found[COLOCATED]
    # There is no other instance to go on meanwhile.
    scene.kill_in_turn((COLOCATED,))


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(each, marks=pytest.mark.drawn(one_in=3))
        for each in ((ROUTER,), (POOL, COLOCATED), (COLOCATED, ROUTER, COLOCATED))
    ],
    ids="-then-".join,
)
def test_killed_in_mid_stream(scenes: Scenes, victims: Sequence[InstanceId]) -> None:
    scenes(num_colocated=1, policy="aligned").kill_in_turn(victims)


@pytest.mark.drawn(one_in=2)
def test_of_two_one_goes_on_with_what_the_other_had(scenes: Scenes) -> None:
    scene = scenes(num_colocated=2, policy="fcfs")

    async def kill(client: Client, streams: list[Stream]) -> None:
        await client.until(lambda: client.num_tokens >= NUM_EARLY * NUM_REQUESTS)
        scene.processes.kill(COLOCATED)
        await client.until(lambda: all_ended(streams))
        scene.processes.start(COLOCATED)

    scene.play(kill)


@pytest.mark.drawn(one_in=2)
def test_killed_among_drops(scenes: Scenes) -> None:
    """A request leaves without its KV, and is computed again wherever it goes on."""
    scene = scenes(num_colocated=1, policy=dropping.NAME)
    scene.kill_in_turn((COLOCATED, ROUTER))
    history = scene.history()
    assert history.dropped[COLOCATED] > 3 and not history.evicted[COLOCATED]
