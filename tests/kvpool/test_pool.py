from __future__ import annotations

import pytest

from alignedserve.kv.span import KvSpan
from alignedserve.kvpool.owners import OwnerTable
from alignedserve.kvpool.pool import Pool, PoolConfig
from alignedserve.protocol.messages import (
    Abort,
    Candidates,
    Commit,
    FindNear,
    FormBatch,
    MakeSpare,
    Message,
    Release,
    Reserve,
    Reserved,
    Stored,
)
from alignedserve.types import InstanceId, PoolBlockId, RequestKey
from tests.kvpool.allocator_steps import hashes_of

A, B, C = RequestKey(1), RequestKey(2), RequestKey(3)
DECODE = InstanceId("decode-0")
CONFIG = PoolConfig(lapse_s=10, horizon_s=1)


def pool_of(num_blocks: int, table: OwnerTable | None = None, now: float = 0) -> Pool:
    return Pool(table or OwnerTable.plain(num_blocks), 4, now, CONFIG)


def only(messages: list[Message]) -> Message:
    (message,) = messages
    return message


def reserve(pool: Pool, key: RequestKey, num_tokens: int, now: float = 0) -> list[PoolBlockId]:
    answer = only(pool.on(Reserve(key, num_tokens), now))
    assert isinstance(answer, Reserved) and answer.key == key and answer.blocks
    return list(answer.blocks)


def put(
    pool: Pool, key: RequestKey, num_tokens: int, due_s: float = 100, now: float = 0
) -> list[PoolBlockId]:
    blocks = reserve(pool, key, num_tokens, now)
    assert pool.on(Commit(key, num_tokens, due_s), now) == []
    return blocks


def batch(pool: Pool, max_blocks: int = 99, now: float = 0) -> list[RequestKey]:
    answer = only(
        pool.on(FormBatch(DECODE, max_blocks, min_requests=1, max_requests=99, starvation_s=5), now)
    )
    assert isinstance(answer, Candidates) and answer.is_batch and answer.decode == DECODE
    return answer.keys


def near(pool: Pool, low: int, high: int, max_requests: int = 99) -> list[RequestKey]:
    answer = only(pool.on(FindNear(DECODE, low, high, max_blocks=99, max_requests=max_requests), 0))
    assert isinstance(answer, Candidates) and not answer.is_batch and answer.decode == DECODE
    return answer.keys


def test_a_request_is_a_candidate_from_its_commit_until_it_is_named() -> None:
    pool = pool_of(20)
    reserve(pool, A, 9)
    assert batch(pool) == [] and pool.num_candidates == 0
    pool.on(Commit(A, 9, due_s=100), 0)
    assert batch(pool) == [A]
    assert batch(pool) == [] and near(pool, 1, 99) == []
    pool.on(Commit(A, 9, due_s=100), 0)
    assert near(pool, 1, 99) == [A]
    assert batch(pool) == [] and near(pool, 1, 99) == []
    pool.on(Release([A]), 0)
    pool.check_idle()


def test_kept_but_no_candidate() -> None:
    pool = pool_of(20)
    put(pool, A, 9)
    pool.on(Commit(A, 9, due_s=100, is_candidate=False), 0)
    assert batch(pool) == [] and pool.num_free_blocks == 17


@pytest.mark.parametrize("message", [MakeSpare([A]), Release([A]), Reserve(A, 13)])
def test_what_is_spare_or_gone_or_grows_is_no_candidate(message: Message) -> None:
    pool = pool_of(20)
    put(pool, A, 9)
    pool.on(message, 0)
    assert batch(pool) == []
    pool.check()


def test_no_room_leaves_a_candidate_one() -> None:
    pool = pool_of(4)
    put(pool, A, 9)
    assert pool.on(Reserve(A, 17), 0) == [Reserved(A, None)]
    assert batch(pool) == [A]


def test_spares_are_dropped_for_room_and_named() -> None:
    pool = pool_of(4)
    put(pool, A, 8)
    put(pool, B, 8)
    assert pool.on(Reserve(C, 4), 0) == [Reserved(C, None)]
    pool.on(MakeSpare([B, A]), 0)
    assert (pool.num_free_blocks, pool.num_spare_blocks) == (0, 4)
    answer = only(pool.on(Reserve(C, 4), 0))
    assert isinstance(answer, Reserved) and answer.dropped == [B] and len(answer.blocks or []) == 1
    # A's copy counts again, since where it lived is gone
    assert pool.on(Commit(A, 8, due_s=100), 0) == []
    assert batch(pool) == [A]
    assert pool.on(Commit(B, 8, due_s=100), 0) == [Reserved(B, None, [B])]


def test_what_lapses_is_told_and_its_commit_refused() -> None:
    pool = pool_of(8)
    reserve(pool, A, 9, now=1)
    put(pool, B, 4, now=1)
    reserve(pool, B, 9, now=2)
    assert pool.tick(10.9) == []
    assert pool.tick(11) == [Reserved(A, None, [A])]
    assert pool.tick(12) == []
    assert pool.num_spare_blocks == 1
    for key in (A, B):
        assert pool.on(Commit(key, 9, due_s=100), 12) == [Reserved(key, None, [key])]
    pool.check_idle()


def test_a_reservation_does_not_lapse_while_there_is_a_router() -> None:
    """A prompt may wait for its turn for as long as it takes, and its blocks be written to at the end."""
    pool = pool_of(8)
    reserve(pool, A, 9, now=0)
    for now in (5, 50, 500):
        assert pool.tick(now, has_router=True) == []
    assert pool.tick(509.9) == []
    assert pool.tick(510) == [Reserved(A, None, [A])]
    pool.check_idle()


def test_a_pool_made_again_has_all_and_awaits_commits() -> None:
    table = OwnerTable.plain(20)
    pool = pool_of(20, table)
    held, reserved = put(pool, A, 9), reserve(pool, B, 5)
    put(pool, C, 4)
    pool.on(MakeSpare([C]), 0)
    again = pool_of(20, table, now=50)
    assert sorted(again.inventory(), key=lambda stored: stored.key)[:2] == [
        Stored(A, held, 9),
        Stored(B, reserved, 0, is_new=True),
    ]
    assert again.num_spare_blocks == 1 and batch(again) == []
    again.on(Commit(A, 9, due_s=100), 50)
    assert batch(again) == [A]
    # the reservation goes on as if nothing had been
    assert again.tick(59) == []
    assert again.on(Commit(B, 5, due_s=100), 59) == []
    again.check()


def test_a_new_router_says_anew_what_is_a_candidate() -> None:
    pool = pool_of(20)
    put(pool, A, 9)
    assert [stored.key for stored in pool.inventory()] == [A]
    assert batch(pool) == []
    pool.on(Commit(A, 9, due_s=100), 0)
    assert batch(pool) == [A]


def test_the_horizon_decides_where_a_batch_is_looked_for() -> None:
    for now, expected in ((98.9, [B, C]), (99.0, [A])):
        pool = pool_of(1000)
        put(pool, A, 3000, due_s=100)
        put(pool, B, 8, due_s=500)
        put(pool, C, 8, due_s=500)
        assert sorted(batch(pool, max_blocks=750, now=now)) == expected


def test_a_range_that_starves_is_served_before_a_denser_one() -> None:
    for now, expected in ((5.0, [B, C]), (5.1, [A])):
        pool = pool_of(1000)
        put(pool, A, 3000, due_s=1000)
        put(pool, B, 8, due_s=1000, now=1)
        put(pool, C, 8, due_s=1000, now=1)
        assert sorted(batch(pool, max_blocks=750, now=now)) == expected


def test_other_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="a Abort is not for the pool"):
        pool_of(1).on(Abort([A]), 0)


@pytest.mark.parametrize(
    ("num_full", "num_sliding", "num_taken"), [(0, 1, 18), (1, 5, 25 + 5 * 18), (3, 1, 3 * 25 + 18)]
)
def test_a_long_request_takes_no_more_of_a_batch_than_its_window_also_under_a_new_router(
    num_full: int, num_sliding: int, num_taken: int
) -> None:
    """It has 100 tokens in 25 columns; sliding groups hold 18 of them, the rest of a tile and a column in part
    included."""
    span = KvSpan(4, 5, 1, num_full, num_sliding)
    pool = Pool(OwnerTable.plain(64), 4, 0, PoolConfig(span=span))
    put(pool, A, 100)
    put(pool, B, 100)
    assert batch(pool, max_blocks=2 * num_taken - 1) == [A]
    pool.inventory()
    for key in (A, B):
        assert pool.on(Commit(key, 100, 100), 0) == []
    assert batch(pool, max_blocks=2 * num_taken) == [A, B]


# ---- candidates with blocks in common --------------------------------------------------------------------------------


def put_behind(pool: Pool, key: RequestKey, name: str) -> None:
    """A candidate of four blocks, known by the letters of the name."""
    (reserved,) = pool.on(Reserve(key, 13, hashes=hashes_of(name, 3)), 0)
    assert isinstance(reserved, Reserved) and reserved.blocks
    assert pool.on(Commit(key, 13, 100), 0) == []


def test_blocks_that_candidates_have_in_common_count_once_in_a_batch() -> None:
    pool = pool_of(99)
    for key in range(1, 6):
        put_behind(pool, RequestKey(key), "aaa")
    assert batch(pool, max_blocks=3) == []
    assert batch(pool, max_blocks=3 + 4) == [1, 2, 3, 4]
    assert batch(pool, max_blocks=3 + 4) == [5]


def test_candidates_of_another_prefix_do_not_end_the_search_for_those_that_fit() -> None:
    pool = pool_of(99)
    for key, name in ((1, "aaa"), (2, "bbb"), (3, "aab"), (4, "aaa")):
        put_behind(pool, RequestKey(key), name)
    assert batch(pool, max_blocks=4 + 2 + 1) == [1, 3, 4]


def test_nearby_candidates_behind_one_prefix_fit_together() -> None:
    pool = pool_of(99)
    for key in range(1, 40):
        put_behind(pool, RequestKey(key), "aaa")
    answer = only(pool.on(FindNear(DECODE, 1, 20, max_blocks=3 + 30, max_requests=99), 0))
    assert isinstance(answer, Candidates) and answer.keys == [*range(1, 31)]
