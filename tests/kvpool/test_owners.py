from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from alignedserve.kvpool.block_allocator import BlockAllocator
from alignedserve.kvpool.owners import AllocationState, OwnerTable
from alignedserve.types import PoolBlockId, RequestKey
from tests.kvpool.allocator_steps import BLOCK_SIZE, Record, assert_between, random_step, records

COLUMNS = ("_key", "_position", "_num_blocks", "_num_tokens", "_state")
Writes = list[list[tuple[int, int, int]]]


class WatchedColumn:
    """Notes each write as (column, row, value) of all that it sets."""

    def __init__(self, values: np.ndarray, column: int, writes: Writes) -> None:
        self.values, self.column, self.writes = values, column, writes

    def __setitem__(self, rows: Any, value: Any) -> None:
        self.values[rows] = value
        touched = np.atleast_1d(np.arange(len(self.values))[rows])
        self.writes.append([(self.column, int(row), int(self.values[row])) for row in touched])

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
    for column, name in enumerate(COLUMNS):
        setattr(table, name, WatchedColumn(getattr(table, name), column, writes))
    return allocator, writes


@pytest.mark.parametrize("seed", range(40))
def test_cut_off_at_any_write_the_table_holds_whole_requests(seed: int) -> None:
    dice, num_blocks = Random(seed), 12
    allocator, writes = watched_allocator(num_blocks)
    columns = np.zeros((OwnerTable.NUM_COLUMNS, num_blocks), np.int64)
    num_cuts = 0
    for now in range(40):
        before = records(allocator)
        writes.clear()
        random_step(allocator, dice, now)
        after = records(allocator)
        # the rows of one write in any order: nothing says which comes first
        single = [each for write in writes for each in dice.sample(write, len(write))]
        for column, row, value in single:
            assert_between(recovered(columns), before, after)
            columns[column, row] = value
            num_cuts += 1
        assert recovered(columns) == after
    assert num_cuts > 40


def recovered(columns: np.ndarray) -> dict[RequestKey, Record]:
    columns = columns.copy()
    allocator = BlockAllocator(OwnerTable(columns), BLOCK_SIZE, deadline_s=0)
    allocator.check()
    assert records(BlockAllocator(OwnerTable(columns), BLOCK_SIZE, deadline_s=0)) == records(allocator)
    return records(allocator)


def test_blocks_come_back_in_the_order_of_their_tokens() -> None:
    table = OwnerTable.plain(6)
    key, blocks = RequestKey(2**63 - 1), [PoolBlockId(block) for block in (4, 1, 5)]
    table.extend(key, [], blocks[:2])
    table.extend(key, blocks[:2], blocks[2:])
    table.record(blocks[0], 11, AllocationState.HELD)
    (allocation,) = table.recover()
    assert (allocation.key, allocation.blocks, allocation.num_tokens) == (key, [4, 1, 5], 11)
    assert allocation.state is AllocationState.HELD and table.num_owned == 3


def test_a_broken_table_is_told_with_both_numbers() -> None:
    table = OwnerTable.plain(6)
    table.extend(RequestKey(7), [], [PoolBlockId(0), PoolBlockId(1), PoolBlockId(2)])
    table._key[1] = 0
    with pytest.raises(RuntimeError, match=r"request 7 has 3 blocks, and 2 rows"):
        table.recover()
