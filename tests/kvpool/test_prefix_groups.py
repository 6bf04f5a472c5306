"""Candidates that begin alike go to a decode instance together, and take the blocks that they share once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kvpool.owners import OwnerTable
from alignedserve.kvpool.pool import Pool, PoolConfig
from alignedserve.protocol.messages import (
    Candidates,
    Commit,
    FindNear,
    FormBatch,
    MakeSpare,
    Release,
    Reserve,
    Reserved,
)
from alignedserve.scheduling.prefixes import TOKENS_PER_HASH, block_hashes_of, prefix_group
from alignedserve.types import InstanceId, PoolBlockId, RequestKey

BLOCK_SIZE = 4
# In blocks: what a group shares, and what a request has of its own.
NUM_COMMON, NUM_OWN = 8, 2
DECODE, OTHER = InstanceId("decode-0"), InstanceId("decode-1")
CONFIG = PoolConfig(lapse_s=10, horizon_s=1)


@dataclass
class Island:
    """A pool with 1,000 blocks, and the blocks that each of its requests was given."""

    pool: Pool = field(default_factory=lambda: Pool(OwnerTable.plain(1000), BLOCK_SIZE, 0.0, CONFIG))
    blocks: dict[int, list[PoolBlockId]] = field(default_factory=dict)

    def put(self, key: int, group: int, num_own: int = NUM_OWN, due_s: float = 100.0) -> None:
        """`group`: 0 if it has no prefix in common with others."""
        num_tokens = (NUM_COMMON + num_own) * BLOCK_SIZE
        tokens = [group or 1000 + key] * (NUM_COMMON * BLOCK_SIZE) + [key] * (num_own * BLOCK_SIZE)
        hashes = block_hashes_of(tokens, BLOCK_SIZE)
        (answer,) = self.pool.on(Reserve(RequestKey(key), num_tokens, hashes=hashes), 0.0)
        assert isinstance(answer, Reserved) and answer.blocks
        self.blocks[key] = answer.blocks
        self.pool.on(Commit(RequestKey(key), num_tokens, due_s, prefix_group=group), 0.0)

    def batch(
        self, max_blocks: int = 999, max_requests: int = 99, fair_share: int = 99, decode: InstanceId = DECODE
    ) -> list[int]:
        ask = FormBatch(decode, max_blocks, max_requests, max_requests, fair_share=fair_share)
        return self._answer(ask, decode)

    def near(
        self,
        low: int = 1,
        high: int = 999,
        max_requests: int = 99,
        decode: InstanceId = DECODE,
        **limits: Any,
    ) -> list[int]:
        ask = FindNear(decode, low, high, **{"max_blocks": 999, "max_requests": max_requests} | limits)
        return self._answer(ask, decode)

    def _answer(self, ask: FormBatch | FindNear, decode: InstanceId) -> list[int]:
        (answer,) = self.pool.on(ask, 0.0)
        assert isinstance(answer, Candidates) and answer.decode == decode
        self.pool.check()
        return [*map(int, answer.keys)]

    def num_distinct(self, keys: list[int]) -> int:
        return len({block for key in keys for block in self.blocks[key]})


def mixed() -> Island:
    """Four requests in each of two groups, and one alone, as they come."""
    island = Island()
    for key in range(1, 9):
        island.put(key, group=1 + key % 2)
    island.put(9, group=0)
    return island


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_takes_a_group_before_the_next_one() -> None:
    assert mixed().batch() == [1, 3, 5, 7, 2, 4, 6, 8, 9]
    assert mixed().batch(max_requests=5) == [1, 3, 5, 7, 2]


def test_what_they_share_takes_its_blocks_once() -> None:
    """With copies of their own, only two of ten blocks each would fit."""
    island = mixed()
    keys = island.batch(max_blocks=NUM_COMMON + 4 * NUM_OWN)
    assert keys == [1, 3, 5, 7]
    assert island.num_distinct(keys) == NUM_COMMON + 4 * NUM_OWN


def test_one_instance_does_not_take_more_than_its_share_because_they_are_alike() -> None:
    island = mixed()
    assert island.batch(max_blocks=25, fair_share=3) == [1, 3, 5]
    assert island.batch(max_blocks=25, fair_share=3, decode=OTHER) == [2, 4, 6]
    # Where as many fit anyway, it takes them.
    assert mixed().batch(fair_share=3) == [1, 3, 5, 7, 2, 4, 6, 8, 9]


def test_one_that_is_due_goes_before_those_that_are_alike() -> None:
    island = mixed()
    island.put(10, group=0, due_s=0.5)
    assert island.batch(max_requests=4) == [10, 1, 3, 5]


def test_nothing_changes_without_groups() -> None:
    island = Island()
    for key in range(1, 9):
        island.put(key, group=0)
    assert island.batch(max_requests=3) == [1, 2, 3]
    assert island.near(max_requests=3) == [4, 5, 6]


# ---- requests that join ----------------------------------------------------------------------------------------------


def test_those_with_a_prefix_that_is_there_join_first() -> None:
    island = mixed()
    assert island.batch(max_requests=1) == [1]
    assert island.near(max_requests=4) == [3, 5, 7, 2]


def test_they_take_only_their_own_blocks() -> None:
    island = mixed()
    assert island.batch(max_requests=1) == [1]
    assert island.near(max_blocks=3 * NUM_OWN) == [3, 5, 7]


def test_those_elsewhere_do_not_count() -> None:
    island = mixed()
    assert island.batch(max_requests=1) == [1]
    island.put(10, group=0, num_own=NUM_OWN + 1)
    length = (NUM_COMMON + NUM_OWN + 1) * BLOCK_SIZE
    assert island.near(low=length, high=length, decode=OTHER) == [10]


@pytest.mark.parametrize("spare", [False, True])
def test_a_request_is_there_until_it_ends(spare: bool) -> None:
    island = mixed()
    assert island.batch(max_requests=1) == [1]
    if spare:
        island.pool.on(MakeSpare([RequestKey(1)]), 0.0)
        assert island.near(max_requests=1) == [3]
        island.pool.on(Release([RequestKey(3)]), 0.0)
    island.pool.on(Release([RequestKey(1)]), 0.0)
    island.put(10, group=0, num_own=NUM_OWN + 1)
    length = (NUM_COMMON + NUM_OWN + 1) * BLOCK_SIZE
    assert island.near(low=length, high=length) == [10]


def test_one_that_returns_is_there_no_more() -> None:
    island = mixed()
    assert island.batch(max_requests=1) == [1]
    island.pool.on(Reserve(RequestKey(1), 60), 0.0)
    island.pool.on(Commit(RequestKey(1), 44, 100.0, prefix_group=2), 0.0)
    assert island.near(low=999, high=999) == []
    assert island.batch(max_requests=4) == [1, 3, 5, 7]


def test_a_new_router_begins_anew() -> None:
    island = mixed()
    assert island.batch(max_requests=1) == [1]
    island.pool.inventory()
    island.pool.check()
    assert island.near() == []


# ---- anything --------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.sampled_from([0.5, 100.0])), max_size=30),
    st.lists(
        st.tuples(
            st.booleans(),
            st.integers(1, 120),
            st.integers(1, 12),
            st.integers(0, 8),
            st.sampled_from([DECODE, OTHER]),
        ),
        max_size=12,
    ),
)
@settings(deadline=None)
def test_a_batch_fits_and_nothing_is_lost(
    requests: list[tuple[int, int, float]], asks: list[tuple[bool, int, int, int, InstanceId]]
) -> None:
    island = Island()
    for key, (group, num_own, due_s) in enumerate(requests, 1):
        island.put(key, group, num_own, due_s)
    left = {*range(1, len(requests) + 1)}
    for is_batch, max_blocks, max_requests, fair_share, decode in asks:
        if is_batch:
            found = island.batch(max_blocks, max_requests, fair_share, decode)
        else:
            found = island.near(1, 999, max_requests, decode, max_blocks=max_blocks)
        assert len({*found}) == len(found) <= max_requests and {*found} <= left
        if is_batch:
            assert island.num_distinct(found) <= max_blocks
        left -= {*found}
    assert island.pool.num_candidates == len(left)
    # Each of them is found in the end, whatever has the same prefix.
    while found := island.batch(max_requests=1):
        left -= {*found}
    assert not left


# ---- names of groups -------------------------------------------------------------------------------------------------


def group_of(num_common: int, num_own: int) -> int:
    tokens = [7] * num_common + [num_own] * num_own
    return prefix_group(block_hashes_of(tokens, TOKENS_PER_HASH))


def test_a_group_has_about_half_of_each_prompt_in_common() -> None:
    assert group_of(1024, 64) == group_of(1024, 200) == group_of(1000, 90) != 0
    assert group_of(512, 1000) == group_of(512, 1001)
    assert group_of(400, 1000) != group_of(400, 1001)
    # Much longer or shorter ones are no batch.
    assert group_of(1024, 64) != group_of(1024, 4000)
    assert group_of(TOKENS_PER_HASH, 1) == group_of(TOKENS_PER_HASH, 2) != 0
    assert group_of(TOKENS_PER_HASH - 2, 1) == 0
