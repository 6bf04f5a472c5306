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
# one after the other on the same processes
SETUPS = [
    ("llama-gqa-tied", "aligned", "host"),
    ("llama-gqa-tied", "aligned", "gloo"),
    ("llama-gqa-tied", "fcfs", "gloo"),
    ("opt", "fcfs", "host"),
    ("opt", "aligned", "gloo"),
    ("llama-gqa-tied", "aligned", "ipc"),
]
# that of `make test`, where test_kill.py has the other links
QUICK = ("llama-gqa-tied", "aligned", "ipc")


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=() if each == QUICK else pytest.mark.slow) for each in SETUPS],
    ids="-".join,
)
def island(
    request: pytest.FixtureRequest, tiny_model: Directory, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    family, policy, link = request.param
    setup = Setup(tiny_model(family), num_kv_heads=FAMILIES[family], policy=policy, link=link)
    with running(setup, tmp_path_factory.mktemp("events")) as processes:
        yield processes


# of requests, each of which is exact; by then everything has taken part, on a busy machine too
MAX_ROUNDS = 8


def generate(island: Processes, requests: list[Request]) -> tuple[Client, list[Stream]]:
    async def scenario() -> tuple[Client, list[Stream]]:
        async with connected(island) as client:
            return client, await client.generate(requests, at_once=12, every=40)

    return asyncio.run(scenario())


def test_greedy_tokens_are_transformers_and_the_engines(island: Processes) -> None:
    known, more = known_requests(), greedy_requests(48, seed=1)
    client, streams = generate(island, [*more[:10], *known, *more[10:]])
    directory = island.setup.directory
    assert [stream.tokens for stream in streams[10:19]] == greedy(directory)
    assert results(streams) == alone(directory, [stream.request for stream in streams])
    heard = client.heard
    for seed in range(3, 3 + MAX_ROUNDS):
        if have_all_moved(History(island.logs)):
            break
        client, streams = generate(island, greedy_requests(48, seed))
        assert results(streams) == alone(directory, [stream.request for stream in streams])
        heard += client.heard
    check_history(island, heard)


def test_sampled_tokens_and_all_logprobs_are_the_engines(island: Processes) -> None:
    requests = sampled_requests(36, seed=2)
    _, streams = generate(island, requests)
    assert results(streams) == alone(island.setup.directory, requests)


def have_all_moved(history: History) -> bool:
    """How many requests find no room depends on how fast each process is."""
    return (
        all(history.evicted[name] for name in DECODES)
        and history.evicted.total() > 5
        and history.num_dropped > 5
        and history.near.total() > 2
    )


def check_history(island: Processes, heard: list[NewTokens]) -> None:
    """Everything took part; and a router that hears what this one heard says what this one said."""
    history, setup = History(island.logs), island.setup
    assert history.news == heard
    # on a busy machine an order to evict may come too late: the request has outgrown its room, and is asked for again
    assert {failed.what for failed in history.failures} <= {"evict"}
    assert all(history.prefills[name] and history.found[name] for name in PREFILLS)
    assert all(history.most_running[name] > 2 for name in DECODES)
    assert have_all_moved(history), (history.evicted, history.num_dropped, history.near)
    assert setup.policy == "fcfs" or all(history.batches[name] > 2 for name in DECODES)
    assert {decode for decode, _ in history.admitted} == set(DECODES)
    # what a prefill instance's buffer had no room for came from the pool
    sources = {source for _, source in history.admitted}
    assert sources >= set(PREFILLS) if setup.link != "host" else sources == {None}
