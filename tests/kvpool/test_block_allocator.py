from __future__ import annotations

import numpy as np
import pytest

from alignedserve.kv.groups import STATE_WINDOW
from alignedserve.kv.span import KvSpan
from alignedserve.kvpool.block_allocator import BlockAllocator, Grant
from alignedserve.kvpool.owners import AllocationState, OwnerTable
from alignedserve.types import PoolBlockId, RequestKey
from tests.kvpool.allocator_steps import hashes_of, records

A, B, C = RequestKey(1), RequestKey(2), RequestKey(3)
SOON, LATER = 10.0, 20.0
WITH_STATES = KvSpan(4, window=STATE_WINDOW, tile_tokens=1, has_state=True)


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
    tree = allocator._tree
    tree.free.append(tree.free[0])
    with pytest.raises(RuntimeError, match=r"3 blocks used \+ 0 kept \+ 2 free != 4"):
        allocator.check()
    tree.free.pop()
    allocator._table.begin(3, B, 1, AllocationState.HELD)
    allocator._table.extend(3, 0, None, tree.free)
    with pytest.raises(RuntimeError, match=r"the owner table has 2 requests, and there are 1"):
        allocator.check()
    allocator._table.publish(np.array(tree.free), hashes_of("a", 1))
    with pytest.raises(RuntimeError, match=r"the owner table has 1 known blocks, and there are 0 in 0 runs"):
        allocator.check()
    tree.num_shared += 1
    with pytest.raises(
        RuntimeError, match=r"3 blocks are counted as needed, 1 as shared, 0 as kept; \(3, 0, 0\) are"
    ):
        allocator.check()
    (allocation,) = allocator.allocations
    assert allocation.tail
    allocation.tail.num_spares += 1
    with pytest.raises(
        RuntimeError, match=r"0 counts 1 requests and 1 spares, and 1 requests and 0 spares list"
    ):
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


# ---- shared content --------------------------------------------------------------------------------------------------


def shared(
    allocator: BlockAllocator, key: RequestKey, name: str, num_tokens: int = 13
) -> tuple[list[PoolBlockId], int]:
    """Reserves blocks for a prompt of this name, and commits it. Returns its blocks and the number of tokens found."""
    grant = allocator.reserve(key, num_tokens, SOON, hashes_of(name, num_tokens // 4))
    assert grant and allocator.commit(key, num_tokens)
    allocator.check()
    return grant.blocks, grant.num_found


def test_what_was_committed_is_found_and_counted_once() -> None:
    allocator = allocator_of(10)
    first, num_found = shared(allocator, A, "aab")
    assert num_found == 0 and allocator.num_free_blocks == 6
    second, num_found = shared(allocator, B, "aac")
    assert num_found == 8 and second[:2] == first[:2] and allocator.num_free_blocks == 4
    third, num_found = shared(allocator, C, "aac")
    assert num_found == 12 and third[:3] == second[:3] and allocator.num_free_blocks == 3
    assert allocator.num_shared_blocks == 3 and allocator.num_spare_blocks == 0


def test_a_request_that_is_found_in_part_has_that_kv_from_the_start() -> None:
    allocator = allocator_of(10)
    shared(allocator, A, "aab")
    grant = allocator.reserve(B, 13, SOON, hashes_of("aab", 3))
    assert grant and (grant.num_tokens, grant.num_found) == (12, 12)
    again = allocator.reserve(B, 13, SOON, hashes_of("aab", 3))
    assert again and again.blocks == grant.blocks and (again.num_tokens, again.num_found) == (12, 0)
    # An instance may still be computing it. The blocks that were found stay.
    assert allocator.lapse(SOON) == [B] and B not in records(allocator)
    assert allocator.reserve(C, 13, SOON, hashes_of("aab", 3)).blocks[:3] == grant.blocks[:3]  # type: ignore[union-attr]


def test_who_only_finds_gets_what_is_known_and_no_free_block() -> None:
    allocator = allocator_of(8)
    first, _ = shared(allocator, A, "abc", 12)
    num_free = allocator.num_free_blocks
    grant = allocator.find(B, 20, SOON, hashes_of("abx", 5))
    assert grant == Grant(first[:2], [], 8, 8)
    assert allocator.num_free_blocks == num_free
    # It holds them, though all others are gone, and then as a spare.
    allocator.release(A)
    allocator.forget_all()
    assert allocator.reserve(C, 28, SOON) is None and allocator.reserve(C, 24, SOON)
    allocator.check()
    allocator.make_spare(B)
    assert records(allocator)[B].blocks == (*first[:2],)
    allocator.release(C)
    # With room for more it goes on from there.
    grown = allocator.reserve(B, 20, SOON)
    assert grown and grown.blocks[:2] == first[:2] and (len(grown.blocks), grown.num_tokens) == (5, 8)
    allocator.check()


def test_who_only_finds_and_finds_nothing_is_not_there() -> None:
    allocator = allocator_of(4)
    shared(allocator, A, "ab", 8)
    # Never the last token's block.
    for num_tokens, name in ((20, "xy"), (4, "ab")):
        assert allocator.find(B, num_tokens, SOON, hashes_of(name, 2)) == Grant([], [])
    assert B not in allocator
    allocator.check()


def test_who_only_finds_takes_no_other_s_row_and_holds_again_what_it_has() -> None:
    allocator = allocator_of(2)
    blocks, _ = shared(allocator, A, "a", 4)
    assert allocator.find(B, 8, SOON, hashes_of("a", 1)).blocks == blocks
    allocator.make_spare(B)
    assert allocator.find(C, 8, SOON, hashes_of("a", 1)) == Grant([], [])
    assert allocator.find(B, 8, SOON) == Grant(blocks, [], 4, 0)
    assert records(allocator)[B].state is AllocationState.RESERVED
    allocator.check()


def test_runs_of_kept_blocks_list_no_block_that_was_taken_again() -> None:
    """A document that is asked about again and again, each time with another end."""
    allocator = allocator_of(60)
    for number in range(40):
        hashes = [*hashes_of("a" * 10, 10), bytes([number + 1]) * len(hashes_of("a", 1)[0])]
        grant = allocator.reserve(A, 45, SOON, hashes)
        assert grant is not None and allocator.commit(A, 45)
        allocator.release(A)
    assert allocator.num_kept_blocks == 50
    allocator.check()
    assert len(allocator._tree._kept) <= 1024 + 2 * 50
    allocator.check()


def test_what_was_only_found_is_told_apart_until_it_is_committed_or_spare() -> None:
    table = OwnerTable.plain(20)
    allocator = BlockAllocator(table, 4, deadline_s=0)
    shared(allocator, A, "aab")

    def are_new() -> dict[RequestKey, bool]:
        found = {each.key: each.is_new for each in allocator.allocations}
        again = BlockAllocator(table, 4, deadline_s=0)
        assert found == {each.key: each.is_new for each in again.allocations}
        assert records(again) == records(allocator)
        return found

    for key in (B, C):
        allocator.reserve(key, 13, SOON, hashes_of("aab", 3))
    assert are_new() == {A: False, B: True, C: True}
    allocator.make_spare(B)
    assert allocator.commit(C, 12)
    assert are_new() == {A: False, B: False, C: False}
    allocator.reserve(C, 20, SOON)
    assert are_new()[C] is False


def test_a_state_is_given_up_when_more_is_to_be_saved_over_it() -> None:
    table = OwnerTable.plain(9)
    allocator = BlockAllocator(table, 4, SOON, span=WITH_STATES)
    for key in (A, B):
        reserve(allocator, key, 9)
        # B's last column is complete, so what it saves next goes to others.
        assert allocator.commit(key, 5 if key == A else 8)
        allocator.make_spare(key)

    def kept() -> dict[RequestKey, int]:
        found = {each.key: each.num_tokens for each in allocator.allocations}
        assert found == {each.key: each.num_tokens for each in BlockAllocator(table, 4, SOON).allocations}
        return found

    assert allocator.reserve(A, 5, SOON) and kept() == {A: 5, B: 8}
    allocator.find(A, 9, SOON)
    assert kept() == {A: 5, B: 8}
    for key, num_tokens in ((A, 5), (B, 8)):
        grant = allocator.reserve(key, 9, SOON)
        # It may still be loaded.
        assert grant and grant.num_tokens == num_tokens
    assert kept() == {A: 0, B: 8}
    for key in (A, B):
        allocator.make_spare(key)
    assert kept() == {B: 8}
    allocator.check()


def test_what_others_have_is_not_written_again_after_a_state_was_given_up() -> None:
    allocator = BlockAllocator(OwnerTable.plain(20), 4, SOON, span=WITH_STATES)
    known = shared(allocator, A, "aab")[0][:3]
    assert shared(allocator, B, "aab")[0][:3] == known and allocator.commit(B, 14)
    assert allocator.reserve(B, 20, SOON)
    allocator.forget_all()
    # A new router asks for the same request.
    grant = allocator.reserve(B, 20, SOON, hashes_of("aab", 3))
    assert grant and grant.num_tokens == 0 and not {*known} & {*grant.blocks}
    allocator.check()


def test_the_last_token_s_block_is_always_its_own() -> None:
    allocator = allocator_of(10)
    shared(allocator, A, "aab", 12)
    assert shared(allocator, B, "aab", 12)[1] == 8


def test_what_is_only_reserved_is_not_found() -> None:
    allocator = allocator_of(10)
    allocator.reserve(A, 13, SOON, hashes_of("aab", 3))
    assert shared(allocator, B, "aab")[1] == 0
    assert allocator.commit(A, 13) and allocator.num_shared_blocks == 0
    # B's blocks are the known ones
    assert shared(allocator, C, "aab")[0][:3] == list(records(allocator)[B].blocks[:3])
    allocator.check()


def test_a_part_of_a_prompt_is_found_as_far_as_it_was_committed() -> None:
    allocator = allocator_of(12)
    allocator.reserve(A, 13, SOON, hashes_of("aab", 3))
    assert allocator.commit(A, 7)
    assert shared(allocator, B, "aab")[1] == 4
    assert allocator.commit(A, 13) and shared(allocator, C, "aab")[1] == 12


def test_content_outlives_its_request_and_goes_leaves_first_when_room_is_needed() -> None:
    allocator = allocator_of(6)
    blocks, _ = shared(allocator, A, "aab")
    allocator.release(A)
    allocator.check_idle()
    assert (allocator.num_free_blocks, allocator.num_spare_blocks, allocator.num_kept_blocks) == (3, 3, 3)
    reserve(allocator, C, 16)
    assert allocator.num_kept_blocks == 2
    grant = allocator.reserve(B, 9, SOON, hashes_of("aab", 3))
    assert grant is None, "two are found and none is left for the third"
    grant = allocator.reserve(B, 5, SOON, hashes_of("aab", 3))
    assert grant and grant.blocks[0] == blocks[0] and grant.num_found == 4
    assert allocator.num_kept_blocks == 0
    allocator.check()


def test_of_spares_and_content_the_one_last_used_first_goes_first() -> None:
    allocator = allocator_of(9)
    shared(allocator, A, "aab")
    shared(allocator, B, "b..", 9)
    allocator.make_spare(B)
    allocator.release(A)
    grant = allocator.reserve(C, 16, SOON)
    assert grant and grant.dropped == [B] and allocator.num_kept_blocks == 5
    grant = allocator.reserve(C, 20, SOON)
    # what the spare had left is older than what was released after it
    assert grant and allocator.num_kept_blocks == 4
    assert shared(allocator, RequestKey(4), "b..", 5)[1] == 4 and allocator.num_kept_blocks == 2
    allocator.check()


def test_a_spare_that_only_lists_what_others_need_is_not_dropped() -> None:
    allocator = allocator_of(5)
    shared(allocator, A, "aab")
    shared(allocator, B, "aab", 12)
    allocator.make_spare(B)
    assert allocator.num_spare_blocks == 1 and allocator.num_free_blocks == 0
    grant = allocator.reserve(C, 4, SOON)
    assert grant and grant.dropped == [B]
    assert allocator.reserve(RequestKey(4), 4, SOON) is None
    allocator.check()


def test_blocks_of_two_stay_with_the_one_that_is_left() -> None:
    for first, second in ((A, B), (B, A)):
        allocator = allocator_of(6)
        shared(allocator, A, "aab")
        shared(allocator, B, "aab")
        allocator.release(first)
        assert records(allocator)[second].num_tokens == 13 and allocator.num_kept_blocks == 0
        allocator.make_spare(second)
        assert allocator.num_spare_blocks == 4 and allocator.num_free_blocks == 2
        allocator.check()


def test_forgotten_content_that_a_request_still_lists_stays_unknown() -> None:
    allocator = allocator_of(12)
    shared(allocator, A, "aab")
    shared(allocator, B, "aac")
    allocator.release(B)
    allocator.forget_all()
    assert allocator.num_kept_blocks == 0
    allocator.check()
    assert shared(allocator, C, "aac")[1] == 0
    assert allocator.commit(A, 13) and allocator.num_shared_blocks == 0
    assert shared(allocator, B, "aab")[1] == 8


def test_all_content_is_forgotten_at_once() -> None:
    allocator = allocator_of(24)
    for key, content in ((A, "aab"), (B, "aac"), (C, "bbb")):
        shared(allocator, key, content)
    allocator.release(A)
    D = RequestKey(4)
    assert allocator.reserve(D, 13, SOON, hashes_of("ccc", 3))
    allocator.forget_all()
    assert allocator.commit(D, 13)
    assert not allocator.known and allocator.num_kept_blocks == 0
    allocator.check()
    # What comes later is known again.
    shared(allocator, A, "aab")
    assert [*allocator.known.values()] == hashes_of("aab", 3)


def test_requests_that_go_on_from_forgotten_content_make_nothing_known() -> None:
    allocator = allocator_of(12)
    shared(allocator, A, "aab", 8)
    grant = allocator.reserve(B, 13, SOON, hashes_of("aab", 3))
    assert grant and grant.num_found == 8
    allocator.forget_all()
    assert allocator.commit(B, 13) and shared(allocator, C, "aab")[1] == 0


def test_an_earlier_routers_room_after_forgotten_content_makes_nothing_known() -> None:
    allocator = allocator_of(12)
    hashes = hashes_of("aab", 3)
    shared(allocator, A, "aab", 8)
    grant = allocator.reserve(B, 13, SOON, hashes)
    assert grant and grant.num_found == 8
    allocator.forget_all()
    # A new router does not know that B has room, and reserves it again.
    assert allocator.reserve(B, 13, SOON, hashes)
    assert allocator.commit(B, 13) and not allocator.known
    allocator.check()


def test_what_is_optional_takes_content_and_leaves_others_their_spares() -> None:
    allocator = allocator_of(12)
    shared(allocator, A, "aab")
    allocator.make_spare(A)
    shared(allocator, B, "b..", 9)
    allocator.release(B)
    # 4 blocks of the spare, 2 of content, which is younger, and 6 free ones
    assert allocator.reserve(C, 36, SOON, is_optional=True) is None
    grant = allocator.reserve(C, 32, SOON, is_optional=True)
    assert grant and not grant.dropped and allocator.num_kept_blocks == 0
    allocator.check()
    grant = allocator.reserve(C, 36, SOON)
    assert grant and grant.dropped == [A]


def test_what_is_optional_counts_the_content_that_it_goes_on_from_as_taken() -> None:
    allocator = allocator_of(7)
    shared(allocator, A, "aab")
    allocator.release(A)
    pooled(allocator, C, 8)
    allocator.make_spare(C)
    # 3 blocks of content, which it goes on from, 2 of a spare and 2 free ones
    assert allocator.reserve(B, 24, SOON, hashes_of("aab", 3), is_optional=True) is None
    grant = allocator.reserve(B, 20, SOON, hashes_of("aab", 3), is_optional=True)
    assert grant and grant.num_found == 12
    allocator.check()


def test_a_restarted_pool_keeps_content_and_forgets_the_ends_of_prompts_first() -> None:
    table = OwnerTable.plain(6)
    allocator = BlockAllocator(table, 4, deadline_s=0)
    blocks, _ = shared(allocator, A, "aab")
    allocator.release(A)
    again = BlockAllocator(table, 4, deadline_s=0)
    again.check()
    assert (again.num_free_blocks, again.num_kept_blocks) == (3, 3)
    reserve(again, C, 16)
    grant = again.reserve(B, 5, SOON, hashes_of("aab", 3))
    assert grant and grant.blocks[0] == blocks[0] and grant.num_found == 4


def test_rows_run_out_only_when_nothing_is_spare() -> None:
    """Requests may list nothing but shared blocks, so there may be more of them than blocks."""
    allocator = allocator_of(3)
    shared(allocator, A, "a", 4)
    for key in range(2, 9):
        grant = allocator.reserve(RequestKey(key), 5, SOON, hashes_of("a", 1))
        assert grant and grant.num_found == 4
        allocator.make_spare(RequestKey(key))
        allocator.check()
    assert len(allocator) == 3 and A in allocator


@pytest.mark.parametrize(("first_whole", "num_found"), [(0, 20), (2, 20), (3, 8)])
def test_columns_that_lack_blocks_are_found_by_no_request(first_whole: int, num_found: int) -> None:
    """The second request has found two columns, and has saved its own from column `first_whole` on without gaps."""
    allocator, hashes = allocator_of(20), hashes_of("aaaaa", 5)
    for key, name, num_tokens in ((A, "aa", 9), (B, "aaaaa", 24)):
        assert allocator.reserve(key, num_tokens, SOON, hashes_of(name, num_tokens // 4))
        assert allocator.commit(key, num_tokens, first_whole if key == B else 0)
    # Later it is all there, and still nothing says which of its columns are whole.
    assert allocator.commit(B, 24)
    grant = allocator.reserve(C, 24, SOON, hashes)
    assert grant and grant.num_tokens == num_found
    allocator.check()
