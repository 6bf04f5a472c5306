"""Two colocated instances that serve by turns: each finds in the pool what the other has computed, and the tokens are
those of each request alone, whatever is killed between them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing

import pytest
from msgspec.structs import replace

from alignedserve.kvpool.process import segments
from alignedserve.kvpool.segment import Segment
from alignedserve.protocol.messages import Cluster, Request
from alignedserve.types import InstanceId
from tests.cluster.client import Client, Stream, all_ended, connected
from tests.cluster.conftest import Borrow
from tests.cluster.processes import COLOCATED, POOL, ROUTER
from tests.cluster.requests import make_request
from tests.cluster.test_shared_content import NUM_COMMON, check, finished, num_found, requests_of, restarted
from tests.engine.helpers import greedy_params

OTHER = InstanceId("colocated-1")
BLOCK_SIZE = 16
NUM_OUTPUT = 40


async def only(client: Client, name: InstanceId) -> None:
    """Of the two, only this one runs, and it has nothing of earlier prompts."""
    await restarted(client, name)
    (gone,) = {COLOCATED, OTHER} - {name}
    client.processes.kill(gone)
    await client.until_cluster(lambda cluster: gone not in names_up(cluster))


def names_up(cluster: Cluster) -> set[InstanceId]:
    return {process.instance_id for process in cluster.processes if process.state == "up"}


async def turn(client: Client, name: InstanceId, requests: Sequence[Request]) -> tuple[list[Stream], int]:
    """These requests run at this instance. Returns them, and how many tokens were computed for them."""
    await only(client, name)
    before = await num_computed(client)
    streams = await finished(client, [replace(each, has_next_turn=True) for each in requests])
    # Until what was computed is saved.
    await client.until_cluster(lambda cluster: not cluster.requests)
    count = await num_computed(client) - before
    (gone,) = {COLOCATED, OTHER} - {name}
    client.processes.start(gone)
    await client.until_all_up()
    return streams, count


async def num_computed(client: Client) -> int:
    return sum(each.stats.num_computed_tokens for each in (await client.cluster()).processes)


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param((), id="none"),
        pytest.param((POOL,), id="pool", marks=pytest.mark.slow),
        pytest.param((ROUTER,), id="router", marks=pytest.mark.slow),
    ],
)
def test_each_finds_what_the_other_has_computed(borrow: Borrow, victims: Sequence[InstanceId]) -> None:
    processes = borrow(num_colocated=2)
    # Others than the cases before it, which use the same processes.
    seed = 1 + sum(map(len, victims))

    async def scenario() -> None:
        async with connected(processes) as client:
            await client.until_all_up()
            all_streams, (request,) = list[Stream](), requests_of(seed, 1)
            num_tokens = len(request.prompt) + NUM_OUTPUT - 1
            for number in range(3):
                # The same prompt, and a chat's next turn.
                asked = make_request(request.prompt, greedy_params(NUM_OUTPUT))
                streams, count = await turn(client, (COLOCATED, OTHER)[number % 2], [asked])
                num_known = (len(request.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE if number else 0
                assert count == num_tokens - num_known
                all_streams += streams
                for name in victims:
                    await restarted(client, name)
            said = [*request.prompt, *all_streams[0].tokens, 5]
            after = make_request(said, greedy_params(NUM_OUTPUT))
            streams, count = await turn(client, OTHER, [after])
            assert count <= BLOCK_SIZE + 2 + NUM_OUTPUT
            check(processes, [*all_streams, *streams])

    asyncio.run(scenario())


def test_killed_while_they_load_and_compute(borrow: Borrow) -> None:
    processes = borrow(num_colocated=2)

    async def scenario() -> None:
        async with connected(processes) as client:
            await client.until_all_up()
            first, _ = await turn(client, COLOCATED, requests_of(11, 1))
            before = await num_found(client)
            streams = [client.submit(each) for each in requests_of(12, 8, common_seed=11)]
            for name in (COLOCATED, POOL, OTHER):
                await client.until(lambda: any(each.tokens for each in streams))
                await restarted(client, name)
            await client.until(lambda: all_ended(streams))
            check(processes, [*first, *streams])
            assert await num_found(client) - before >= NUM_COMMON
            await client.until_idle()

    asyncio.run(scenario())


def test_a_wrong_block_makes_a_prompt_computed(borrow: Borrow) -> None:
    processes = borrow(num_colocated=2, verify_blocks=1.0)

    async def scenario() -> None:
        async with connected(processes) as client:
            await client.until_all_up()
            first, _ = await turn(client, COLOCATED, requests_of(21, 1))
            (name,) = segments(processes.segment_prefix)
            with closing(Segment.attach(name)) as segment:
                known = [int(block) for block in segment.table.recover().known]
                segment.blocks[known, 100] ^= 64
            second, count = await turn(client, OTHER, requests_of(22, 1, common_seed=21))
            assert count == len(second[0].request.prompt) + NUM_OUTPUT - 1
            check(processes, [*first, *second])

    asyncio.run(scenario())
