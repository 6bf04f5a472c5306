from __future__ import annotations

import time
from random import Random
from typing import Any

import numpy as np
import pytest

from alignedserve.kvpool.block_allocator import BlockAllocator
from alignedserve.kvpool.block_tree import BlockTree
from alignedserve.kvpool.owners import AllocationState, OwnerTable
from alignedserve.types import PoolBlockId, RequestKey
from tests.kvpool.allocator_steps import (
    BLOCK_SIZE,
    Record,
    assert_between,
    hashes_of,
    known,
    random_step,
    records,
)

# Each with its first column.
COLUMNS = {"_parent": 0, "_is_known": 1, "_hash": 2, "_key": 6, "_num_tokens": 7, "_state": 8, "_tail": 9}
Writes = list[list[tuple[int, int]]]


class WatchedColumn:
    """Notes each write as (place, value) of all words that it sets. Places count through all columns."""

    def __init__(self, values: np.ndarray, column: int, writes: Writes) -> None:
        self.values, self.writes = values, writes
        self.places = column * values.shape[-1] + np.arange(values.size).reshape(values.shape)

    def __setitem__(self, rows: Any, value: Any) -> None:
        self.values[rows] = value
        places, words = np.atleast_1d(self.places[rows]), np.atleast_1d(self.values[rows])
        self.writes.append([*zip(places.ravel().tolist(), words.ravel().tolist(), strict=True)])

    def __getitem__(self, rows: Any) -> Any:
        return self.values[rows]

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.values


def watched_allocator(num_blocks: int) -> tuple[BlockAllocator, Writes]:
    table = OwnerTable.plain(num_blocks)
    writes: Writes = []
    allocator = BlockAllocator(table, BLOCK_SIZE, deadline_s=0)
    for name, column in COLUMNS.items():
        setattr(table, name, WatchedColumn(getattr(table, name), column, writes))
    return allocator, writes


@pytest.mark.parametrize("seed", range(40))
def test_cut_off_at_any_write_the_table_holds_whole_requests(seed: int) -> None:
    dice, num_blocks = Random(seed), 12
    allocator, writes = watched_allocator(num_blocks)
    columns = np.zeros((OwnerTable.NUM_COLUMNS, num_blocks), np.int64)
    num_cuts = num_shared = 0
    for now in range(150):
        before, known_before = records(allocator), known(allocator)
        writes.clear()
        random_step(allocator, dice, now)
        allocator.check()
        after, known_after = records(allocator), known(allocator)
        num_shared += allocator.num_shared_blocks + allocator.num_kept_blocks
        # the words of one write in any order: nothing says which comes first
        single = [each for write in writes for each in dice.sample(write, len(write))]
        for place, value in single:
            found, content = recovered(columns)
            assert_between(found, before, after)
            assert content.items() <= known_before.items() | known_after.items()
            assert content.items() >= known_before.items() & known_after.items()
            columns.reshape(-1)[place] = value
            num_cuts += 1
        assert recovered(columns) == (after, known_after)
    assert num_cuts > 40 and num_shared


def recovered(columns: np.ndarray) -> tuple[dict[RequestKey, Record], dict[int, bytes]]:
    columns = columns.copy()
    allocator = BlockAllocator(OwnerTable(columns), BLOCK_SIZE, deadline_s=0)
    allocator.check()
    again = BlockAllocator(OwnerTable(columns), BLOCK_SIZE, deadline_s=0)
    assert (records(again), known(again)) == (records(allocator), known(allocator))
    return records(allocator), known(allocator)


def test_blocks_come_back_in_the_order_of_their_tokens() -> None:
    table = OwnerTable.plain(6)
    key, blocks = RequestKey(2**63 - 1), [PoolBlockId(block) for block in (4, 1, 5)]
    table.begin(3, key, 11, AllocationState.HELD)
    table.extend(3, 0, None, blocks[:2])
    table.extend(3, 2, blocks[1], blocks[2:])
    (allocation,) = BlockAllocator(table, BLOCK_SIZE, deadline_s=0).allocations
    assert (allocation.key, allocation.blocks, allocation.num_tokens) == (key, [4, 1, 5], 11)
    assert allocation.state is AllocationState.HELD and allocation.row == 3
    assert table.num_requests == 1 and table.num_known == 0


def test_requests_list_the_same_blocks_and_content_comes_back_with_its_place() -> None:
    table = OwnerTable.plain(6)
    first, blocks = hashes_of("ab", 2), [PoolBlockId(block) for block in (4, 1)]
    for row, own in ((0, 5), (2, 0)):
        table.begin(row, RequestKey(row + 1), 9, AllocationState.HELD)
        if row == 0:
            table.extend(row, 0, None, blocks)
            table.publish(np.array(blocks), first)
        table.extend(row, 2, blocks[1], [PoolBlockId(own)])
    found = table.recover()
    assert found.known == {1: first[1], 4: first[0]}
    assert found.is_used.tolist() == [True, True, False, False, True, True]
    tree = BlockTree(table, found)
    assert [each.blocks for each, _ in found.allocations] == [[4, 1, 5], [4, 1, 0]]
    (run,) = {each.tail.parent for each, _ in found.allocations if each.tail}
    assert tree.find(first, 2) == (run, 2) and run and (run.first, run.blocks) == (0, [4, 1])


def test_what_continues_content_that_is_gone_is_forgotten() -> None:
    table = OwnerTable.plain(6)
    blocks = [PoolBlockId(block) for block in range(6)]
    table.begin(0, RequestKey(1), 9, AllocationState.HELD)
    table.extend(0, 0, None, blocks)
    table.publish(np.array(blocks), hashes_of("", 6))
    table.forget([PoolBlockId(2)])
    assert [*table.recover().known] == [0, 1] and table.num_known == 2


def test_a_broken_table_is_told_with_both_numbers() -> None:
    table = OwnerTable.plain(6)
    table.begin(4, RequestKey(7), 0, AllocationState.RESERVED)
    table.extend(4, 0, None, [PoolBlockId(0), PoolBlockId(1), PoolBlockId(2)])
    table._parent[0] = 4
    with pytest.raises(RuntimeError, match=r"request 7 has 3 blocks, and more are linked"):
        table.recover()
    table._parent[1] = 0
    with pytest.raises(RuntimeError, match=r"request 7 has 3 blocks, and 2 are linked"):
        table.recover()


def test_many_requests_are_recovered_in_a_moment() -> None:
    """100,000 blocks, of which 50 requests each share 125."""
    table, num_blocks = OwnerTable.plain(100_000), 0
    for row in range(9500):
        if row % 50 == 0:
            shared = [PoolBlockId(block) for block in range(num_blocks, num_blocks + 125)]
            num_blocks += 125
        own = [PoolBlockId(block) for block in range(num_blocks, num_blocks + 8)]
        num_blocks += 8
        table.begin(row, RequestKey(row + 1), 133 * 16, AllocationState.HELD)
        if row % 50 == 0:
            table.extend(row, 0, None, shared)
        table.extend(row, len(shared), shared[-1], own)
    begun_s = time.process_time()
    found = BlockAllocator(table, 16, deadline_s=0).allocations
    assert time.process_time() - begun_s < 5
    assert len(found) == 9500 and {len(each.blocks) for each in found} == {133}
