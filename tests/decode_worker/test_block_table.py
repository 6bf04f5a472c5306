"""Counts of blocks where requests hold those of a window: 30 tokens, in blocks of 16 and tiles of 64."""

from __future__ import annotations

from alignedserve.decode_worker.block_table import BlockTable
from alignedserve.decode_worker.scheduled_request import ScheduledRequest, scheduled_request
from alignedserve.protocol.messages import InstanceLimits
from tests.works import make_work

LIMITS = InstanceLimits(
    num_blocks=40, block_size=16, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=600, window=30
)
# Of 30 - 1 tokens before, a tile's other 63 and 32 that are computed, which may begin anywhere in a block.
MOST = -(-(29 + 63 + 32) // 16) + 1


def prompt(num_tokens: int, num_cached: int = 0) -> ScheduledRequest:
    work = make_work(num_tokens, output_len=0, num_cached=num_cached, max_tokens=100)
    return scheduled_request(work, None, 0, LIMITS.max_model_len)


def computed(table: BlockTable, request: ScheduledRequest, count: int) -> None:
    assert table.grow(request, request.num_cached + count)
    request.num_cached += count
    if request.num_cached == request.num_tokens:
        request.num_tokens += 1


def test_a_long_prompt_never_needs_more_blocks_than_it_has() -> None:
    table, request = BlockTable(LIMITS), prompt(500)
    assert table.growth_of(request, 1) == table.needed(request) == MOST
    table.start(request)
    others = prompt(16 * (40 - MOST))
    table.start(prompt(others.num_tokens))
    assert table.num_free == 40 - MOST - table.needed(others) and request.num_blocks == MOST
    num_free, num_passing = table.num_free, 0
    while request.num_pending > 1:
        assert table.growth_of(request, 1) == 0
        computed(table, request, min(32, request.num_pending))
        num_passing += len(table.free_passed())
        assert table.num_free >= num_free
        table.check()
    assert num_passing == (500 + 1 - 30) // 64
    # What it decodes with: the blocks from the tile of its first visible token on.
    assert request.num_passed == (500 + 1 - 30) // 64 * 64 // 16
    assert request.num_blocks == 32 - request.num_passed < MOST
    assert table.growth([request], 13) == table.growth_of(request, 13) == 1


def test_what_comes_from_the_pool_takes_no_blocks_for_what_it_passed() -> None:
    table, request = BlockTable(LIMITS), prompt(500, num_cached=499)
    assert table.growth_of(request, 1) == 32 - 28
    table.admit(request)
    assert (table.num_free, request.num_blocks, request.num_passed) == (36, 4, 28)
    assert table.pulled(request.key) and table.free_passed() == []
    for _ in range(99):
        computed(table, request, 1)
        table.free_passed()
        assert request.num_blocks <= 7
        table.check()
    table.ended(request.key)
    assert table.num_free == 40


def test_an_instance_may_have_fewer_blocks_than_its_longest_request_has_tokens_for() -> None:
    BlockTable(
        InstanceLimits(
            num_blocks=MOST, block_size=16, max_num_batched_tokens=32, max_model_len=600, window=30
        )
    )
