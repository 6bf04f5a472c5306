"""How far a prompt is, as real instances say it, and when the one that computes it dies."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import PromptProgress, Request
from tests.cluster.client import Stream, all_ended, connected
from tests.cluster.processes import COLOCATED, PREFILLS, Processes
from tests.cluster.requests import alone, make_request, results
from tests.engine.helpers import greedy_params
from tests.tiny_models import VOCAB_SIZE

# Several chunks of the 64 tokens that an iteration has here.
NUM_PROMPT = 250


def asked(seed: int) -> Request:
    dice = Random(seed)
    prompt = [dice.randrange(VOCAB_SIZE) for _ in range(NUM_PROMPT)]
    return replace(make_request(prompt, greedy_params(4)), reports_progress=True)


def check_whole(progress: list[PromptProgress]) -> None:
    """It ends with the whole prompt, before the first token."""
    assert all(each.num_tokens == NUM_PROMPT for each in progress)
    assert all(each.num_reused <= each.num_computed <= NUM_PROMPT for each in progress)
    assert all(each.seconds >= 0 for each in progress)
    assert progress[-1].num_computed == NUM_PROMPT


def test_it_grows_chunk_by_chunk(slow_processes: Processes) -> None:
    async def scenario() -> None:
        async with connected(slow_processes) as client:
            request = asked(seed=1)
            first = client.submit(request)
            await client.until(partial(all_ended, [first]))
            check_whole(first.progress)
            computed = [each.num_computed for each in first.progress]
            assert computed == sorted(set(computed)) and len(computed) >= 3
            assert {each.num_reused for each in first.progress} == {0}

    asyncio.run(scenario())


@pytest.mark.slow
def test_it_goes_on_elsewhere(slow_processes: Processes) -> None:
    victim = COLOCATED if slow_processes.setup.num_colocated else PREFILLS[0]

    async def scenario() -> None:
        async with connected(slow_processes) as client:
            streams = [client.submit(asked(seed)) for seed in range(10, 16)]
            await client.until(lambda: any(stream.progress for stream in streams))
            slow_processes.kill(victim)
            slow_processes.start(victim)
            await client.until(partial(all_ended, streams))
            check(slow_processes, streams)

    asyncio.run(scenario())


def check(processes: Processes, streams: list[Stream]) -> None:
    for stream in streams:
        check_whole(stream.progress)
    assert results(streams) == alone(processes.setup.directory, [stream.request for stream in streams])
