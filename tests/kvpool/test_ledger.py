from __future__ import annotations

import pytest

from alignedserve.kvpool.ledger import Ledger
from alignedserve.kvpool.owners import OwnerTable, State
from alignedserve.types import RequestKey
from tests.kvpool.ledger_steps import records

A, B, C = RequestKey(1), RequestKey(2), RequestKey(3)
SOON, LATER = 10.0, 20.0


def ledger_of(num_blocks: int, block_size: int = 4) -> Ledger:
    return Ledger(OwnerTable.plain(num_blocks), block_size, deadline_s=0)


def reserve(ledger: Ledger, key: RequestKey, num_tokens: int, deadline_s: float = SOON) -> list[int]:
    grant = ledger.reserve(key, num_tokens, deadline_s)
    assert grant
    return grant.blocks


def pooled(ledger: Ledger, key: RequestKey, num_tokens: int) -> list[int]:
    blocks = reserve(ledger, key, num_tokens)
    assert ledger.commit(key, num_tokens)
    return blocks


def test_a_request_gets_more_blocks_after_those_it_has() -> None:
    ledger = ledger_of(4)
    first = reserve(ledger, A, 5)
    assert len(first) == 2
    assert reserve(ledger, A, 5) == reserve(ledger, A, 1) == first
    assert reserve(ledger, A, 9)[:2] == first
    assert ledger.num_free_blocks == 1
    ledger.check()


def test_no_room_changes_nothing() -> None:
    ledger = ledger_of(4)
    reserve(ledger, A, 8)
    before = records(ledger)
    assert ledger.reserve(B, 9, SOON) is None
    assert ledger.reserve(A, 17, SOON) is None
    assert records(ledger) == before and B not in ledger and ledger.num_free_blocks == 2


def test_spares_go_oldest_first_and_only_as_many_as_needed() -> None:
    ledger = ledger_of(6)
    for key in (A, B, C):
        pooled(ledger, key, 8)
    ledger.make_spare(B)
    ledger.make_spare(A)
    assert ledger.num_spare_blocks == 4 and ledger.num_free_blocks == 0
    grant = ledger.reserve(RequestKey(4), 8, SOON)
    assert grant and grant.dropped == [B]
    assert A in ledger and ledger.num_spare_blocks == 2
    ledger.check()


def test_a_spare_that_grows_is_not_dropped_for_itself() -> None:
    ledger = ledger_of(4)
    pooled(ledger, A, 8)
    pooled(ledger, B, 8)
    ledger.make_spare(A)
    assert ledger.reserve(A, 12, SOON) is None
    assert records(ledger)[A].state is State.SPARE
    ledger.make_spare(B)
    grant = ledger.reserve(A, 12, SOON)
    assert grant and grant.dropped == [B] and len(grant.blocks) == 3


def test_what_is_in_use_is_never_dropped() -> None:
    ledger = ledger_of(2)
    pooled(ledger, A, 4)
    reserve(ledger, B, 4)
    assert ledger.reserve(C, 4, SOON) is None


def test_reservations_lapse_to_what_was_committed() -> None:
    ledger = ledger_of(8)
    reserve(ledger, A, 4)
    kept = pooled(ledger, B, 6)
    reserve(ledger, B, 16)
    reserve(ledger, C, 4, LATER)
    assert ledger.lapse(SOON - 1) == []
    assert ledger.lapse(SOON) == [A]
    assert records(ledger)[B] == (tuple(kept), 6, State.SPARE)
    assert records(ledger)[C].state is State.RESERVED
    assert ledger.num_free_blocks == 5
    assert ledger.lapse(LATER) == [C]
    assert not ledger.commit(A, 4) and not ledger.commit(B, 16) and ledger.commit(B, 7)


def test_reserving_again_puts_the_deadline_off_and_a_commit_takes_it_away() -> None:
    ledger = ledger_of(8)
    reserve(ledger, A, 4, SOON)
    reserve(ledger, A, 4, LATER)
    pooled(ledger, B, 4)
    assert ledger.lapse(SOON) == []
    assert ledger.lapse(LATER) == [A] and ledger.lapse(1e9) == [] and B in ledger


def test_calls_for_requests_without_blocks_are_harmless() -> None:
    ledger = ledger_of(2)
    ledger.release(A)
    ledger.make_spare(A)
    assert not ledger.commit(A, 1)
    pooled(ledger, A, 1)
    ledger.release(A)
    ledger.release(A)
    ledger.check_idle()
    assert ledger.num_free_blocks == 2


def test_a_reservation_made_spare_keeps_what_is_committed() -> None:
    """An eviction that failed: its blocks are free again at once."""
    ledger = ledger_of(4)
    pooled(ledger, A, 4)
    reserve(ledger, A, 16)
    ledger.make_spare(A)
    assert ledger.num_free_blocks == 3 and ledger.num_spare_blocks == 1
    ledger.check()


def test_broken_counts_are_told_with_both_numbers() -> None:
    ledger = ledger_of(4)
    reserve(ledger, A, 12)
    with pytest.raises(RuntimeError, match=r"1 requests have blocks, and 0 should: \[1\]"):
        ledger.check_idle()
    ledger._free.append(ledger._free[0])
    with pytest.raises(RuntimeError, match=r"3 blocks used \+ 2 free != 4"):
        ledger.check()
    ledger._free.pop()
    ledger._table._key[ledger._free[0]] = 9
    with pytest.raises(RuntimeError, match=r"table has 4 owned blocks, 3 are used"):
        ledger.check()


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_nothing_is_no_number_of_tokens(num_tokens: int) -> None:
    ledger = ledger_of(1)
    with pytest.raises(ValueError, match=f"num_tokens={num_tokens} of request 1: must be at least 1"):
        ledger.reserve(A, num_tokens, SOON)
    with pytest.raises(ValueError, match=f"num_tokens={num_tokens} of request 1: must be at least 1"):
        ledger.commit(A, num_tokens)
    with pytest.raises(ValueError, match="block_size=0: must be at least 1"):
        ledger_of(1, block_size=0)
