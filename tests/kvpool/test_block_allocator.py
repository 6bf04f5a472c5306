from __future__ import annotations

import pytest

from alignedserve.kvpool.block_allocator import BlockAllocator
from alignedserve.kvpool.owners import AllocationState, OwnerTable
from alignedserve.types import PoolBlockId, RequestKey
from tests.kvpool.allocator_steps import records

A, B, C = RequestKey(1), RequestKey(2), RequestKey(3)
SOON, LATER = 10.0, 20.0


def allocator_of(num_blocks: int, block_size: int = 4) -> BlockAllocator:
    return BlockAllocator(OwnerTable.plain(num_blocks), block_size, deadline_s=0)


def reserve(
    allocator: BlockAllocator, key: RequestKey, num_tokens: int, deadline_s: float = SOON
) -> list[PoolBlockId]:
    grant = allocator.reserve(key, num_tokens, deadline_s)
    assert grant
    return grant.blocks


def pooled(allocator: BlockAllocator, key: RequestKey, num_tokens: int) -> list[PoolBlockId]:
    blocks = reserve(allocator, key, num_tokens)
    assert allocator.commit(key, num_tokens)
    return blocks


def test_a_request_gets_more_blocks_after_those_it_has() -> None:
    allocator = allocator_of(4)
    first = reserve(allocator, A, 5)
    assert len(first) == 2
    assert reserve(allocator, A, 5) == reserve(allocator, A, 1) == first
    assert reserve(allocator, A, 9)[:2] == first
    assert allocator.num_free_blocks == 1
    allocator.check()


def test_no_room_changes_nothing() -> None:
    allocator = allocator_of(4)
    reserve(allocator, A, 8)
    before = records(allocator)
    assert allocator.reserve(B, 9, SOON) is None
    assert allocator.reserve(A, 17, SOON) is None
    assert records(allocator) == before and B not in allocator and allocator.num_free_blocks == 2


def test_spares_go_oldest_first_and_only_as_many_as_needed() -> None:
    allocator = allocator_of(6)
    for key in (A, B, C):
        pooled(allocator, key, 8)
    allocator.make_spare(B)
    allocator.make_spare(A)
    assert allocator.num_spare_blocks == 4 and allocator.num_free_blocks == 0
    grant = allocator.reserve(RequestKey(4), 8, SOON)
    assert grant and grant.dropped == [B]
    assert A in allocator and allocator.num_spare_blocks == 2
    allocator.check()


def test_a_spare_that_grows_is_not_dropped_for_itself() -> None:
    allocator = allocator_of(4)
    pooled(allocator, A, 8)
    pooled(allocator, B, 8)
    allocator.make_spare(A)
    assert allocator.reserve(A, 12, SOON) is None
    assert records(allocator)[A].state is AllocationState.SPARE
    allocator.make_spare(B)
    grant = allocator.reserve(A, 12, SOON)
    assert grant and grant.dropped == [B] and len(grant.blocks) == 3


def test_what_is_in_use_is_never_dropped() -> None:
    allocator = allocator_of(2)
    pooled(allocator, A, 4)
    reserve(allocator, B, 4)
    assert allocator.reserve(C, 4, SOON) is None


def test_reservations_lapse_to_what_was_committed() -> None:
    allocator = allocator_of(8)
    reserve(allocator, A, 4)
    kept = pooled(allocator, B, 6)
    reserve(allocator, B, 16)
    reserve(allocator, C, 4, LATER)
    assert allocator.lapse(SOON - 1) == []
    assert allocator.lapse(SOON) == [A]
    assert records(allocator)[B] == (tuple(kept), 6, AllocationState.SPARE)
    assert records(allocator)[C].state is AllocationState.RESERVED
    assert allocator.num_free_blocks == 5
    assert allocator.lapse(LATER) == [C]
    assert not allocator.commit(A, 4) and not allocator.commit(B, 16) and allocator.commit(B, 7)


def test_reserving_again_puts_the_deadline_off_and_a_commit_takes_it_away() -> None:
    allocator = allocator_of(8)
    reserve(allocator, A, 4, SOON)
    reserve(allocator, A, 4, LATER)
    pooled(allocator, B, 4)
    assert allocator.lapse(SOON) == []
    assert allocator.lapse(LATER) == [A] and allocator.lapse(1e9) == [] and B in allocator


def test_calls_for_requests_without_blocks_are_harmless() -> None:
    allocator = allocator_of(2)
    allocator.release(A)
    allocator.make_spare(A)
    assert not allocator.commit(A, 1)
    pooled(allocator, A, 1)
    allocator.release(A)
    allocator.release(A)
    allocator.check_idle()
    assert allocator.num_free_blocks == 2


def test_a_reservation_made_spare_keeps_what_is_committed() -> None:
    """An eviction that failed: its blocks are free again at once."""
    allocator = allocator_of(4)
    pooled(allocator, A, 4)
    reserve(allocator, A, 16)
    allocator.make_spare(A)
    assert allocator.num_free_blocks == 3 and allocator.num_spare_blocks == 1
    allocator.check()


def test_broken_counts_are_told_with_both_numbers() -> None:
    allocator = allocator_of(4)
    reserve(allocator, A, 12)
    with pytest.raises(RuntimeError, match=r"1 requests have blocks, and 0 should: \[1\]"):
        allocator.check_idle()
    allocator._free.append(allocator._free[0])
    with pytest.raises(RuntimeError, match=r"3 blocks used \+ 2 free != 4"):
        allocator.check()
    allocator._free.pop()
    allocator._table._key[allocator._free[0]] = 9
    with pytest.raises(RuntimeError, match=r"table has 4 owned blocks, 3 are used"):
        allocator.check()


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_nothing_is_no_number_of_tokens(num_tokens: int) -> None:
    allocator = allocator_of(1)
    with pytest.raises(ValueError, match=f"num_tokens={num_tokens} of request 1: must be at least 1"):
        allocator.reserve(A, num_tokens, SOON)
    with pytest.raises(ValueError, match=f"num_tokens={num_tokens} of request 1: must be at least 1"):
        allocator.commit(A, num_tokens)
    with pytest.raises(ValueError, match="block_size=0: must be at least 1"):
        allocator_of(1, block_size=0)
