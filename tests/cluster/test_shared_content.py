"""Prompts that begin alike, at different instances: the second loads what the first has computed, and the tokens are
those of each alone, whatever is killed, aborted or evicted between them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import pytest

from alignedserve.kv.groups import STATE_WINDOW, LayerGroups
from alignedserve.kv.span import KvSpan
from alignedserve.protocol.messages import Request
from alignedserve.types import InstanceId
from tests.cluster.client import Client, Stream, all_ended, connected
from tests.cluster.conftest import FAMILY, Borrow
from tests.cluster.history import History
from tests.cluster.processes import MAX_BLOCKS, POOL, PREFILLS, ROUTER, Processes
from tests.cluster.requests import alone, make_request, results
from tests.engine.helpers import greedy_params
from tests.tiny_models import VOCAB_SIZE

NUM_COMMON = 128


def sliding(num_full: int, num_sliding: int, **options: Any) -> dict[str, Any]:
    """Options for a model with layers that attend to the latest 24 tokens. Every load of the pool's blocks is
    checked."""
    span = KvSpan(16, 24, max_step=1, num_full_groups=num_full, num_sliding_groups=num_sliding)
    checked = {"verify_blocks": 1.0, "num_decode_blocks": MAX_BLOCKS}
    return {"span": span, "num_groups": span.num_groups} | checked | options


def with_states(num_full: int, num_state: int) -> dict[str, Any]:
    """Options for a model that has layers with a state."""
    groups = LayerGroups((), 1, num_full, num_state, STATE_WINDOW, has_state=True)
    return sliding(num_full, num_state, span=KvSpan.of(groups, block_size=16, max_step=1))


MISTRAL = ("mistral-window", sliding(0, 1))
GEMMA = ("gemma3", sliding(1, 2, head_dim=32))
every_kind = pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param(FAMILY, {}, id="all"),
        pytest.param(*GEMMA, id="gemma3"),
        pytest.param(
            *("fading-sum", with_states(1, 2)),
            id="states",
            marks=[pytest.mark.slow, pytest.mark.drawn(one_in=2)],
        ),
        pytest.param(*MISTRAL, id="mistral", marks=[pytest.mark.slow, pytest.mark.drawn(one_in=3)]),
    ],
)


def requests_of(seed: int, num: int, num_output: int = 40, common_seed: int | None = None) -> list[Request]:
    """All begin with the same 128 tokens, which no other seed has."""
    begins, dice = Random(f"beginning {common_seed or seed}"), Random(seed)
    common = [begins.randrange(VOCAB_SIZE) for _ in range(NUM_COMMON)]
    prompts = [
        [*common, *(dice.randrange(VOCAB_SIZE) for _ in range(dice.randint(1, 60)))] for _ in range(num)
    ]
    return [make_request(prompt, greedy_params(num_output)) for prompt in prompts]


async def finished(client: Client, requests: Sequence[Request]) -> list[Stream]:
    streams = [client.submit(each) for each in requests]
    await client.until(lambda: all_ended(streams))
    return streams


async def num_found(client: Client) -> int:
    """Tokens with KV found in the pool, since the router started."""
    (pool,) = [each for each in (await client.cluster()).processes if each.instance_id == POOL]
    return pool.stats.num_found_tokens


async def restarted(client: Client, name: InstanceId) -> None:
    client.processes.kill(name)
    client.processes.start(name)
    await client.until_all_up()


def has_heard(client: Client, num_tokens: int) -> bool:
    return client.num_tokens >= num_tokens


def check(processes: Processes, streams: Sequence[Stream]) -> None:
    expected = alone(processes.setup.directory, [stream.request for stream in streams])
    assert results(streams) == expected


@every_kind
def test_another_instance_loads_what_the_first_has_computed(
    borrow: Borrow, family: str, options: dict[str, Any]
) -> None:
    processes = borrow(family, **options)

    async def scenario() -> None:
        async with connected(processes) as client:
            await client.until_all_up()
            before = await num_found(client)
            (first,) = await finished(client, requests_of(1, 1))
            # What either has in its own blocks is gone.
            for name in PREFILLS:
                await restarted(client, name)
            second = await finished(client, requests_of(2, 3, common_seed=1))
            assert await num_found(client) - before >= NUM_COMMON
            check(processes, [first, *second])
            reused = {news.key: news.num_reused for news in client.heard if not news.first}
            assert NUM_COMMON in [reused[stream.request.key] for stream in second]
            await client.until_idle()

    asyncio.run(scenario())


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("victims", [(POOL,), (ROUTER,), (POOL, ROUTER)], ids="-".join)
def test_what_was_computed_outlives_the_pool_and_the_router(
    borrow: Borrow, victims: Sequence[InstanceId], family: str, options: dict[str, Any]
) -> None:
    processes = borrow(family, **options)

    async def scenario() -> None:
        async with connected(processes) as client:
            await client.until_all_up()
            first = await finished(client, requests_of(11, 1))
            for name in (*victims, *PREFILLS):
                await restarted(client, name)
            before = await num_found(client)
            second = await finished(client, requests_of(12, 2, common_seed=11))
            assert await num_found(client) - before >= NUM_COMMON
            check(processes, [*first, *second])
            await client.until_idle()

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"), [pytest.param(FAMILY, {}, id="all"), pytest.param(*GEMMA, id="gemma3")]
)
def test_one_ends_while_others_list_the_same_blocks_and_are_evicted(
    borrow: Borrow, family: str, options: dict[str, Any]
) -> None:
    """On a decode instance there is room for three, so some are evicted; the pool is killed meanwhile."""
    processes = borrow(family, **options)

    async def scenario() -> None:
        async with connected(processes) as client:
            await client.until_all_up()
            before, heard = await num_found(client), client.num_tokens
            await finished(client, requests_of(21, 1, num_output=4))
            streams = [client.submit(each) for each in requests_of(22, 12, 150, common_seed=21)]
            for number, stream in enumerate(streams[:3]):
                await client.until(partial(has_heard, client, heard + 60 * (number + 1)))
                client.close(stream.request.key, "abort")
            await restarted(client, POOL)
            await client.until(lambda: all_ended(streams[3:]))
            check(processes, streams[3:])
            assert await num_found(client) - before >= 4 * NUM_COMMON
            await client.until_idle()

    asyncio.run(scenario())
    assert History(processes.logs).evicted.total()
