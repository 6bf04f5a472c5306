"""Through the whole system, as processes: the tokens that the engine alone gives, whatever moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignedserve.protocol.messages import NewTokens, Request
from tests.cluster.client import Client, Stream, connected
from tests.cluster.history import History
from tests.cluster.processes import DECODES, PREFILLS, Processes, Setup, running
from tests.cluster.requests import alone, greedy_requests, known_requests, results, sampled_requests
from tests.tiny_models import greedy

Directory = Callable[[str], Path]
FAMILIES = {"llama-gqa-tied": 2, "opt": 4}
DRAWN = (pytest.mark.slow, pytest.mark.drawn(one_in=3))
# The first one is in every run, also in those of `make test`; one or two of the others are too.
SETUPS = [
    ("llama-gqa-tied", "aligned", "ipc"),
    pytest.param(("llama-gqa-tied", "fcfs", "gloo"), marks=DRAWN),
    pytest.param(("opt", "aligned", "host"), marks=DRAWN),
    pytest.param(("llama-gqa-tied", "aligned", "host"), marks=DRAWN),
    pytest.param(("llama-gqa-tied", "aligned", "gloo"), marks=DRAWN),
    pytest.param(("opt", "fcfs", "host"), marks=DRAWN),
]
# By then everything has taken part, on a busy machine too.
MAX_ROUNDS = 8


@pytest.fixture(params=SETUPS, ids="-".join)
def island(request: pytest.FixtureRequest, tiny_model: Directory, tmp_path: Path) -> Iterator[Processes]:
    """Of its own, since its whole history is looked at."""
    family, policy, link = request.param
    setup = Setup(tiny_model(family), num_kv_heads=FAMILIES[family], policy=policy, link=link)
    with running(setup, tmp_path) as processes:
        yield processes


def generate(island: Processes, requests: list[Request]) -> tuple[Client, list[Stream]]:
    async def scenario() -> tuple[Client, list[Stream]]:
        async with connected(island) as client:
            return client, await client.generate(requests, at_once=12, every=40)

    return asyncio.run(scenario())


def test_tokens_and_all_logprobs_are_transformers_and_the_engines(island: Processes) -> None:
    known, greedy_ones, sampled = known_requests(), greedy_requests(24, seed=1), sampled_requests(24, seed=2)
    more = [each for pair in zip(greedy_ones, sampled, strict=True) for each in pair]
    client, streams = generate(island, [*more[:10], *known, *more[10:]])
    directory = island.setup.directory
    assert [stream.tokens for stream in streams[10:19]] == greedy(directory)
    assert results(streams) == alone(directory, [stream.request for stream in streams])
    heard = client.heard
    for seed in range(3, 3 + MAX_ROUNDS):
        if have_all_moved(History(island.logs)):
            break
        client, streams = generate(island, greedy_requests(24, seed))
        assert results(streams) == alone(directory, [stream.request for stream in streams])
        heard += client.heard
    check_history(island, heard)


def have_all_moved(history: History) -> bool:
    """How many requests find no room depends on how fast each process is."""
    return (
        all(history.prefills[name] and history.found[name] for name in PREFILLS)
        and all(history.evicted[name] and history.most_running[name] > 2 for name in DECODES)
        and history.evicted.total() > 5
        and history.num_dropped > 5
        and history.near.total() > 2
    )


def check_history(island: Processes, heard: list[NewTokens]) -> None:
    """Everything took part; and a router that gets what this one got sends what this one sent."""
    history, setup = History(island.logs), island.setup
    assert history.news == heard
    # On a busy machine an order to evict may arrive too late: the request has outgrown its room, and is evicted again.
    assert {failed.what for failed in history.failures} <= {"evict"}
    assert have_all_moved(history), vars(history)
    assert setup.policy == "fcfs" or all(history.batches[name] > 2 for name in DECODES)
    assert {decode for decode, _ in history.admitted} == set(DECODES)
    # What a prefill instance's buffer had no room for came from the pool.
    sources = {source for _, source in history.admitted}
    assert sources >= set(PREFILLS) if setup.link != "host" else sources == {None}
