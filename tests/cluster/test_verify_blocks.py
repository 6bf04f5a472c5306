"""A bit of a block in the pool flips: the next request that loads the block computes it again, and gets its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from alignedserve.kvpool.process import segments
from alignedserve.kvpool.segment import Segment
from alignedserve.process.logs import LogConfig
from alignedserve.protocol.messages import Request
from alignedserve.scheduling.prefixes import block_hashes_of
from alignedserve.types import InstanceId
from tests.cluster.client import Client, connected
from tests.cluster.conftest import Borrow
from tests.cluster.processes import DECODES, POOL, PREFILLS, Processes
from tests.cluster.test_shared_content import NUM_COMMON, check, finished, num_found, requests_of, restarted

# The block of the common prefix that changes.
NUMBER = 3


def hash_of(request: Request) -> bytes:
    return block_hashes_of(request.prompt, 16)[NUMBER]


def known(processes: Processes) -> dict[bytes, int]:
    """The blocks that the pool knows by their content."""
    (name,) = segments(processes.segment_prefix)
    with closing(Segment.attach(name)) as segment:
        return {block_hash: int(block) for block, block_hash in segment.table.recover().known.items()}


def flip_bit(processes: Processes, request: Request) -> int:
    """Flips a bit of the request's block in the pool, as a bad memory module would. Returns the block."""
    block = known(processes)[hash_of(request)]
    (name,) = segments(processes.segment_prefix)
    with closing(Segment.attach(name)) as segment:
        segment.blocks[block, 100] ^= 64
    return block


async def counts(client: Client) -> tuple[int, int]:
    """How many blocks were checked since the router started, and how many of them had changed."""
    stats = [process.stats for process in (await client.cluster()).processes]
    return sum(each.num_checked_blocks for each in stats), sum(each.num_changed_blocks for each in stats)


@pytest.mark.parametrize(
    ("forgetful", "killed", "finder"),
    [
        # A prefill instance has nothing in its own blocks and loads the prefix, or only a decode instance does.
        pytest.param(PREFILLS[:1], (), PREFILLS[0], id="prefill"),
        pytest.param(DECODES[:1], (), DECODES[0], id="decode"),
        pytest.param(PREFILLS[:1], (POOL,), PREFILLS[0], id="pool-killed", marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_is_found(
    borrow: Borrow,
    tmp_path: Path,
    forgetful: Sequence[InstanceId],
    killed: Sequence[InstanceId],
    finder: InstanceId,
) -> None:
    log = LogConfig(dir=str(tmp_path / "logs"))
    processes = borrow(verify_blocks=1.0, num_each=1, log=log)

    async def scenario() -> None:
        async with connected(processes) as client:
            first = await finished(client, requests_of(1, 1))
            for name in (*forgetful, *killed):
                await restarted(client, name)
            block = flip_bit(processes, first[0].request)
            assert (await counts(client))[1] == 0
            second = await finished(client, requests_of(2, 1, common_seed=1))
            await client.until_idle()
            num_checked, num_changed = await counts(client)
            assert num_checked > NUM_COMMON // 16 and num_changed == 1
            # What was known is not known any more, and the request makes nothing known.
            assert not known(processes)
            logged = (tmp_path / "logs" / f"{finder}.log").read_text()
            assert logged.count(f"Block {block} of the KV pool has changed since it was saved") == 1
            # The next request makes the right content known again, and others use it.
            third = await finished(client, requests_of(3, 1, common_seed=1))
            for name in forgetful:
                await restarted(client, name)
            before = await num_found(client)
            fourth = await finished(client, requests_of(4, 1, common_seed=1))
            assert await num_found(client) - before >= NUM_COMMON and (await counts(client))[1] == 1
            check(processes, [*first, *second, *third, *fourth])

    asyncio.run(scenario())


def test_nothing_is_checked_unless_that_is_asked_for(borrow: Borrow) -> None:
    processes = borrow(num_each=1)

    async def scenario() -> None:
        async with connected(processes) as client:
            first = await finished(client, requests_of(1, 1))
            await restarted(client, PREFILLS[0])
            flip_bit(processes, first[0].request)
            await finished(client, requests_of(2, 1, common_seed=1))
            assert await counts(client) == (0, 0)

    asyncio.run(scenario())
