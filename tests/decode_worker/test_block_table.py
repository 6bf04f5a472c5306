"""Counts of blocks where requests hold those of a window: 30 tokens, in blocks of 16 and tiles of 64. And where they
share some."""

from __future__ import annotations

from msgspec.structs import replace

from alignedserve.decode_worker.block_table import BlockTable
from alignedserve.decode_worker.scheduled_request import ScheduledRequest, scheduled_request
from alignedserve.instance.memory import BlockManager
from alignedserve.instance.prefix_cache import PrefixCache
from alignedserve.protocol.messages import InstanceLimits, Work
from tests.works import make_work

LIMITS = InstanceLimits(
    num_blocks=40, block_size=16, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=600, window=30
)
# Of 30 - 1 tokens before, a tile's other 63 and 32 that are computed, which may begin anywhere in a block.
MOST = -(-(29 + 63 + 32) // 16) + 1


def prompt(num_tokens: int, num_cached: int = 0) -> ScheduledRequest:
    work = make_work(num_tokens, output_len=0, num_cached=num_cached, max_tokens=100)
    return scheduled_request(work, None, 0, LIMITS.max_model_len)


def table_of(limits: InstanceLimits = LIMITS) -> BlockTable:
    memory = BlockManager(limits.num_blocks, limits.span)
    return BlockTable(limits, memory, PrefixCache(memory, is_enabled=False))


def computed(table: BlockTable, request: ScheduledRequest, count: int) -> None:
    assert table.grow(request, request.num_cached + count)
    table._memory.settle()
    request.num_cached += count
    if request.num_cached == request.num_tokens:
        request.num_tokens += 1


def test_a_long_prompt_never_needs_more_blocks_than_it_has() -> None:
    table, request = table_of(), prompt(500)
    assert table.growth_of(request, 1) == table.needed(request) == MOST
    table.start(request)
    others = prompt(16 * (40 - MOST))
    table.start(prompt(others.num_tokens))
    assert table.num_free == 40 - MOST - table.needed(others) and request.num_blocks == MOST
    num_free, num_passed = table.num_free, 0
    while request.num_pending > 1:
        assert table.growth_of(request, 1) == 0
        before = request.num_passed
        computed(table, request, min(32, request.num_pending))
        table.free_passed()
        num_passed += request.num_passed > before
        assert table.num_free >= num_free
        table.check()
    assert num_passed == (500 + 1 - 30) // 64
    # What it decodes with: the blocks from the tile of its first visible token on.
    assert request.num_passed == (500 + 1 - 30) // 64 * 64 // 16
    assert request.num_blocks == 32 - request.num_passed < MOST
    assert table.growth([request], 13) == table.growth_of(request, 13) == 1


def test_what_comes_from_the_pool_takes_no_blocks_for_what_it_passed() -> None:
    table, request = table_of(), prompt(500, num_cached=499)
    assert table.growth_of(request, 1) == 32 - 28
    table.admit(request)
    assert (table.num_free, request.num_blocks, request.num_passed) == (36, 4, 28)
    assert table.pulled(request.key)
    table.free_passed()
    assert request.num_passed == 28
    for _ in range(99):
        computed(table, request, 1)
        table.free_passed()
        assert request.num_blocks <= 7
        table.check()
    table.ended(request.key)
    assert table.num_free == 40


def test_an_instance_may_have_fewer_blocks_than_its_longest_request_has_tokens_for() -> None:
    table_of(
        InstanceLimits(
            num_blocks=MOST, block_size=16, max_num_batched_tokens=32, max_model_len=600, window=30
        )
    )


# ---- shared blocks ---------------------------------------------------------------------------------------------------


COMMON = [bytes([number]) for number in range(20)]


class AllAlike(PrefixCache):
    """The first blocks of all requests are the same ones."""

    def num_held(self, work: Work) -> int:
        return self._memory.num_held(COMMON)


class Sharing:
    """A table of requests that are admitted by a plan of their own, with blocks in common."""

    def __init__(self, num_blocks: int = 40) -> None:
        of_it = replace(LIMITS, window=0, num_blocks=num_blocks)
        self._memory = BlockManager(num_blocks, of_it.span, counts_once=True)
        self.table = BlockTable(of_it, self._memory, AllAlike(self._memory, is_enabled=True))

    def admit(self, request: ScheduledRequest) -> None:
        self._memory.share(request, COMMON)
        self.table.admit(request)
        self._memory.settle()
        self._memory.publish(request, 0, COMMON)


def test_a_shared_block_is_taken_and_freed_once() -> None:
    sharing = Sharing()
    table = sharing.table
    requests = [prompt(16 * 22, num_cached=16 * 22 - 1) for _ in range(4)]
    for request, num_needed in zip(requests, (22, 2, 2, 2), strict=True):
        assert table.needed(request) == table.growth_of(request, 1) == num_needed
        sharing.admit(request)
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
    table.ended(third.key)
    assert table.num_free == 40
    table.check()


def test_requests_that_share_need_a_block_of_their_own_to_grow() -> None:
    sharing = Sharing(38)
    table = sharing.table
    requests = [prompt(16 * 22, num_cached=16 * 22 - 1) for _ in range(2)]
    for request in requests:
        sharing.admit(request)
        assert table.pulled(request.key)
    assert table.num_free == 38 - 24 and table.growth(requests, 2) == 2
    for request in requests:
        computed(table, request, 1)
        computed(table, request, 1)
    assert table.num_free == 38 - 26
    table.check()
