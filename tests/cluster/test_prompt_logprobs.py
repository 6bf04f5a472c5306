"""A prompt's log-probabilities when processes die around it: all of them, the engine's own, and once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from alignedserve.protocol.messages import Cluster, Request
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import InstanceId
from tests.cluster.client import Client, all_ended, connected
from tests.cluster.processes import DECODES, POOL, PREFILLS, ROUTER, Processes, Setup, running
from tests.cluster.requests import alone, make_request, results

NUM_REQUESTS = 6
# several chunks, each of which a slow instance takes a tenth of a second for
PROMPTS = [[(number * 7 + place) % 150 for place in range(280)] for number in range(NUM_REQUESTS)]

Directory = Callable[[str], Path]


def requests() -> list[Request]:
    params = [
        SamplingParams(prompt_logprobs=number % 3, seed=number, max_tokens=8, ignore_eos=True)
        for number in range(NUM_REQUESTS)
    ]
    return [make_request(*each) for each in zip(PROMPTS, params, strict=True)]


@pytest.fixture(scope="module", params=["host", pytest.param("gloo", marks=pytest.mark.slow)])
def processes(
    request: pytest.FixtureRequest, tiny_model: Directory, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    setup = Setup(tiny_model("llama-gqa-tied"), link=request.param, is_slow=True)
    with running(setup, tmp_path_factory.mktemp("events")) as found:
        yield found


def is_computing(cluster: Cluster) -> bool:
    """Some prompts are half done, and some tokens may be on their way."""
    return cluster.requests.get("prefilling", 0) >= 2


@pytest.mark.parametrize(
    "victims",
    [
        [PREFILLS[0]],
        pytest.param([ROUTER], marks=pytest.mark.slow),
        pytest.param([POOL], marks=pytest.mark.slow),
        pytest.param([DECODES[0]], marks=pytest.mark.slow),
        pytest.param([ROUTER, PREFILLS[1]], marks=pytest.mark.slow),
        [POOL, ROUTER],
    ],
    ids="-then-".join,
)
def test_killed_while_prompts_are_computed(processes: Processes, victims: list[InstanceId]) -> None:
    async def scenario() -> None:
        async with connected(processes) as client:
            streams = [client.submit(request) for request in requests()]
            await client.until_cluster(is_computing)
            for victim in victims:
                processes.kill(victim)
                processes.start(victim)
                # the next one dies when another prompt's are there, and not all of them
                await client.until(partial(has_told, client, num_told(client) + 1))
            assert num_told(client) < NUM_REQUESTS
            await client.until(partial(all_ended, streams))
            assert results(streams) == alone(processes.setup.directory, [each.request for each in streams])

    asyncio.run(scenario())


def num_told(client: Client) -> int:
    return sum(each.prompt_logprobs is not None for each in client.streams)


def has_told(client: Client, num_prompts: int) -> bool:
    return num_told(client) >= num_prompts
