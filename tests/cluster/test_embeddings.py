"""Embeddings from real processes, beside answers, and when processes die around them: transformers' own, and once."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Cluster, Request
from alignedserve.protocol.pooling import DTYPE, NO_SAMPLING, POOLINGS
from alignedserve.types import InstanceId
from tests.cluster.client import ASK_S, TIMEOUT_S, Client, Stream, all_ended, connected
from tests.cluster.processes import COLOCATED, PREFILLS, ROUTER, Processes
from tests.cluster.requests import alone, greedy_requests, make_request, results
from tests.tiny_models import VOCAB_SIZE, embeddings

NUM_EMBEDDED = 8


def to_embed() -> list[Request]:
    """Several chunks each; of both classes and both poolings."""
    dice = Random(3)
    made = []
    for number in range(NUM_EMBEDDED):
        prompt = [dice.randrange(VOCAB_SIZE) for _ in range(200 + number)]
        pooling, tier = POOLINGS[number % 2], ("rt", "be")[number // 2 % 2]
        made.append(replace(make_request(prompt, NO_SAMPLING), pooling=pooling, tier=tier))
    return made


def check(client: Client, directory: Path, embedded: list[Stream], answered: list[Stream]) -> None:
    said = [news for news in client.heard if news.embedding]
    for stream in embedded:
        (news,) = {news.embedding: news for news in said if news.key == stream.request.key}.values()
        assert stream.finish_reason == "stop" and not stream.tokens
        prompt, pooling = tuple(stream.request.prompt), stream.request.pooling
        assert pooling
        (right,) = embeddings(directory, pooling, (prompt,))
        np.testing.assert_allclose(np.frombuffer(news.embedding, DTYPE), right, atol=2e-5)
    assert results(answered) == alone(directory, [stream.request for stream in answered])


def is_computing(cluster: Cluster) -> bool:
    return cluster.requests.get("prefilling", 0) + cluster.requests.get("running", 0) >= 2


async def until_computing(client: Client, embedded: list[Stream], answered: list[Stream]) -> None:
    """Asks for as many again whenever all have ended before anybody saw two of them computed."""
    async with asyncio.timeout(TIMEOUT_S):
        while not is_computing(await client.cluster()):
            if all_ended([*embedded, *answered]):
                ask(client, embedded, answered)
            await asyncio.sleep(ASK_S)


def ask(client: Client, embedded: list[Stream], answered: list[Stream]) -> None:
    answered += [client.submit(request) for request in greedy_requests(3, seed=5, longest=24)]
    embedded += [client.submit(request) for request in to_embed()]


VICTIMS = [pytest.param(None, marks=pytest.mark.drawn(one_in=2)), PREFILLS[0], ROUTER]


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS, ids=str)
def test_embeddings_beside_answers(slow_processes: Processes, victim: InstanceId | None) -> None:
    if victim not in (None, ROUTER) and slow_processes.setup.num_colocated:
        victim = COLOCATED

    async def scenario() -> None:
        async with connected(slow_processes) as client:
            embedded: list[Stream] = []
            answered: list[Stream] = []
            ask(client, embedded, answered)
            if victim is not None:
                await until_computing(client, embedded, answered)
                slow_processes.kill(victim)
                slow_processes.start(victim)
            await client.until(partial(all_ended, [*answered, *embedded]))
            check(client, slow_processes.setup.directory, embedded, answered)

    asyncio.run(scenario())
