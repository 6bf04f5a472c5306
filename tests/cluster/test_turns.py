"""Turns of chats through real processes. What was said in earlier turns is computed once, whatever was killed
meanwhile, and the tokens are those of each turn alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.types import InstanceId
from tests.cluster.client import Client, Stream, all_ended, connected
from tests.cluster.conftest import Borrow
from tests.cluster.processes import DECODES, POOL, PREFILLS, ROUTER, Processes
from tests.cluster.requests import alone, make_request, results
from tests.engine.helpers import greedy_params
from tests.tiny_models import VOCAB_SIZE

BLOCK_SIZE = 16
NUM_NEW, NUM_OUTPUT, NUM_TURNS = 25, 40, 4
# Room for all chats of this file. On a decode instance that is short of blocks, an answer that is not saved soon makes
# room, and machines are slow. A full pool drops something, and after a restart it does not know what was used last.
ROOMY: dict[str, Any] = {"num_decode_blocks": 200, "num_pool_blocks": 400}


async def say(client: Client, said: list[list[int]], dice: Random) -> list[Stream]:
    """Each of these chats has another turn."""
    for each in said:
        each += [dice.randrange(VOCAB_SIZE) for _ in range(NUM_NEW)]
    asked = [replace(make_request([*each], greedy_params(NUM_OUTPUT)), has_next_turn=True) for each in said]
    streams = [client.submit(each) for each in asked]
    await client.until(lambda: all_ended(streams))
    for each, stream in zip(said, streams, strict=True):
        each += stream.tokens
    # Until the answers are saved.
    await client.until_idle()
    return streams


def play(processes: Processes, killed: Sequence[InstanceId], seed: int) -> None:
    """`killed`: after the second turn."""

    async def scenario() -> None:
        said: list[list[int]] = [[] for _ in range(3)]
        dice, all_streams = Random(seed), list[Stream]()
        async with connected(processes) as client:
            await client.until_all_up()
            for turn in range(NUM_TURNS):
                before = [len(each) for each in said]
                streams = await say(client, said, dice)
                all_streams += streams
                reused = {news.key: news.num_reused for news in client.heard if not news.first}
                for num_before, stream in zip(before, streams, strict=True):
                    # An answer's last token gets its KV in the next turn.
                    num_known = max(num_before - 1, 0) // BLOCK_SIZE * BLOCK_SIZE
                    assert reused[stream.request.key] >= num_known, (turn, num_before)
                if turn == 1:
                    # The pool answers this after it has read all that it was told before.
                    barrier = client.submit(make_request([1, 2, 3], greedy_params(1)))
                    await client.until(lambda: all_ended([barrier]))  # noqa: B023
                    for name in killed:
                        processes.kill(name)
                        processes.start(name)
                    await client.until_all_up()
        expected = alone(processes.setup.directory, [stream.request for stream in all_streams])
        assert results(all_streams) == expected

    asyncio.run(scenario())


def test_what_was_said_is_computed_once(borrow: Borrow) -> None:
    # Instances have nothing any more that they might have kept.
    play(borrow(**ROOMY), (*PREFILLS, *DECODES), seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "killed", [(), (POOL, *PREFILLS), (ROUTER, *DECODES)], ids=["none", "pool", "router"]
)
def test_whatever_is_killed(borrow: Borrow, killed: Sequence[InstanceId]) -> None:
    play(borrow(**ROOMY), killed, seed=2 + len(killed))
