"""Counts of blocks where requests hold those of a window: 30 tokens, in blocks of 16 and tiles of 64. And where they
share some."""

from __future__ import annotations

from msgspec.structs import replace

from alignedserve.decode_worker.block_table import BlockTable
from alignedserve.decode_worker.scheduled_request import ScheduledRequest, scheduled_request
from alignedserve.instance.prefix_dedup import NoPrefixCache
from alignedserve.protocol.messages import InstanceLimits, Work
from alignedserve.types import RequestKey
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


# ---- shared blocks ---------------------------------------------------------------------------------------------------


class AllAlike(NoPrefixCache):
    """The first blocks of all requests are the same ones."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._table: BlockTable | None = None

    def see(self, table: BlockTable) -> BlockTable:
        self._table = table
        return table

    @property
    def _keys(self) -> set[RequestKey]:
        assert self._table is not None
        return {*self._table.pulling, *self._table.running, *self._table.leaving, *self._table._dying}

    def num_held(self, work: Work) -> int:
        return self._count if self._keys else 0

    def num_shared(self, key: RequestKey) -> int:
        return self._count if self._keys - {key} else 0

    @property
    def num_repeated(self) -> int:
        return self._count * max(len(self._keys) - 1, 0)


def sharing(num_blocks: int = 40) -> BlockTable:
    shared = AllAlike(20)
    return shared.see(BlockTable(replace(LIMITS, window=0, num_blocks=num_blocks), shared=shared))


def test_a_shared_block_is_taken_and_freed_once() -> None:
    table = sharing()
    requests = [prompt(16 * 22, num_cached=16 * 22 - 1) for _ in range(4)]
    for request, num_needed in zip(requests, (22, 2, 2, 2), strict=True):
        assert table.needed(request) == table.growth_of(request, 1) == num_needed
        table.admit(request)
        table.check()
    assert table.num_free == 40 - 22 - 3 * 2
    first, second, third, fourth = requests
    assert table.pulled(first.key) and table.pulled(second.key) and table.pulled(third.key)
    assert [table.num_freed(each) for each in requests] == [2, 2, 2, 2]
    assert table.num_freed_together([first, second]) == 2 + 2
    assert table.num_freed_together([first, second, third]) == 3 * 2
    table.ended(first.key)
    assert table.evict(second.key) and table.num_blocks_to_come == 2
    assert table.evicted(second.key)
    assert table.abort(fourth.key) and table.num_blocks_to_come == 2
    assert not table.pulled(fourth.key)
    table.check()
    assert table.num_free == 40 - 22 and table.num_freed_together([third]) == 22
    table.drop(third)
    assert table.num_free == 40
    table.check()


def test_requests_that_share_need_a_block_of_their_own_to_grow() -> None:
    table = sharing(38)
    requests = [prompt(16 * 22, num_cached=16 * 22 - 1) for _ in range(2)]
    for request in requests:
        table.admit(request)
        assert table.pulled(request.key)
    assert table.num_free == 38 - 24 and table.growth(requests, 2) == 2
    for request in requests:
        computed(table, request, 1)
        computed(table, request, 1)
    assert table.num_free == 38 - 26
    table.check()
