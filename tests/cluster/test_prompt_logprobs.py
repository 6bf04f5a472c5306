"""A prompt's log-probabilities when processes die around it: all of them, the engine's own, and once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from alignedserve.protocol.messages import Cluster, Request
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import InstanceId
from tests.cluster.client import Client, all_ended, connected
from tests.cluster.conftest import Borrow
from tests.cluster.processes import DECODES, POOL, PREFILLS, ROUTER
from tests.cluster.requests import alone, make_request, results

NUM_REQUESTS = 6
# several chunks, each of which a slow instance takes a tenth of a second for
PROMPTS = [[(number * 7 + place) % 150 for place in range(280)] for number in range(NUM_REQUESTS)]


def requests() -> list[Request]:
    params = [
        SamplingParams(prompt_logprobs=number % 3, seed=number, max_tokens=8, ignore_eos=True)
        for number in range(NUM_REQUESTS)
    ]
    return [make_request(*each) for each in zip(PROMPTS, params, strict=True)]


def is_computing(cluster: Cluster) -> bool:
    """Some prompts are half done, and some tokens may be on their way."""
    return cluster.requests.get("prefilling", 0) >= 2


EVERY_RUN = {("host", (POOL, ROUTER)), ("host", (PREFILLS[0],)), ("gloo", (ROUTER, PREFILLS[1]))}
DEATHS = ((PREFILLS[0],), (ROUTER,), (POOL,), (DECODES[0],), (ROUTER, PREFILLS[1]), (POOL, ROUTER))
CASES = [
    pytest.param(
        link,
        victims,
        marks=() if (link, victims) in EVERY_RUN else pytest.mark.drawn(one_in=5),
        id=f"{link}-{'-then-'.join(victims)}",
    )
    for link in ("host", "gloo")
    for victims in DEATHS
]


@pytest.mark.slow
@pytest.mark.parametrize(("link", "victims"), CASES)
def test_killed_while_prompts_are_computed(borrow: Borrow, link: str, victims: Sequence[InstanceId]) -> None:
    processes = borrow(link=link, is_slow=True)

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
