"""Copies of KV between an instance and the pool or other instances: which are running, and the blocks that each moves.

A copy moves its blocks column by column, those of all layer groups that have not passed the column
(`kv/span.py`). Both ends of a copy list them in this order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import compress

from alignedserve.instance.executor import Transfers
from alignedserve.instance.memory import BlockManager
from alignedserve.kv.held import NO_BLOCK, Held
from alignedserve.kv.span import KvSpan
from alignedserve.protocol.messages import Moved
from alignedserve.transport.completions import Done, Outcome
from alignedserve.transport.runs import Pairs
from alignedserve.types import BlockId, PoolBlockId, RequestKey

# Seconds per wait for stopped copies. Each ends on its own, at its deadline at the latest.
DRAIN_STEP_S = 1.0


class RunningCopies:
    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        # Running copies per request.
        self._num_running: Counter[RequestKey] = Counter()
        # Bytes and seconds of copies since the last report, by kind.
        self._moved: dict[str, Moved] = {}
        # Blocks of the pool that loads found to have changed.
        self.num_changed = 0

    def __len__(self) -> int:
        return self._num_running.total()

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._num_running

    def load(self, key: RequestKey, pairs: Pairs, done: Done, is_urgent: bool = False) -> None:
        """`done` is called in either half of an iteration, or while orders are dropped."""
        self._transfers.load(key, pairs, self.counted([key], done), is_urgent)

    def save(
        self, key: RequestKey, pairs: Pairs, num_empty: int, done: Done, is_urgent: bool = False
    ) -> None:
        self._transfers.save(key, pairs, num_empty, self.counted([key], done), is_urgent)

    def counted(self, keys: Sequence[RequestKey], done: Done) -> Done:
        """Counts a copy of these requests that is about to start, and returns its `done`."""
        self._num_running.update(keys)
        return partial(self._ended, done)

    def _ended(self, done: Done, outcome: Outcome) -> None:
        self._num_running.subtract(outcome.keys)
        if outcome.error is None or outcome.num_checked:
            moved = self.moved(outcome.what, outcome.num_bytes, outcome.seconds)
            moved.num_checked += outcome.num_checked
            moved.num_changed += outcome.num_changed
            self.num_changed += outcome.num_changed
        for key in outcome.keys:
            if not self._num_running[key]:
                del self._num_running[key]
        done(outcome)

    def stop(self) -> None:
        """Stops all copies, and returns when none is running."""
        self._transfers.cut()
        for key in self._num_running:
            self._transfers.abandon(key)
        while self._num_running:
            self._transfers.completions.run(DRAIN_STEP_S)

    def moved(self, what: str, num_bytes: int, seconds: float) -> Moved:
        moved = self._moved.setdefault(what, Moved(what, 0, 0.0))
        moved.num_bytes += num_bytes
        moved.seconds += seconds
        return moved

    def take_moved(self) -> list[Moved]:
        moved, self._moved = self._moved, {}
        return list(moved.values())


def blocks_with(memory: BlockManager, held: Held, num_cached: int) -> list[BlockId]:
    """Returns the owner's blocks that the token after the first `num_cached` attends to."""
    span = memory.span
    end = span.num_columns(num_cached)
    return [*compress(memory.in_columns(held, 0, end), span.are_held(0, end, span.num_passed(num_cached)))]


def pool_blocks(
    span: KvSpan, columns: Sequence[PoolBlockId], first: int, end: int, num_passed: int
) -> list[PoolBlockId]:
    """Returns the pool's blocks, one per layer group, for columns `first` to `end` of a request with these
    `columns`."""
    size = span.num_groups
    blocks = [PoolBlockId(column * size + group) for column in columns[first:end] for group in range(size)]
    return [*compress(blocks, span.are_held(first, end, num_passed))]


def pairs_of(
    memory: BlockManager,
    held: Held,
    columns: Sequence[PoolBlockId],
    first: int,
    end: int,
    num_passed: int,
) -> Pairs:
    """Returns the owner's blocks in columns `first` to `end`, each with its pool block."""
    here = [*compress(memory.in_columns(held, first, end), memory.span.are_held(first, end, num_passed))]
    if NO_BLOCK in here:
        raise RuntimeError(
            f"a block of columns {first} to {end} is lacking, and the first {num_passed} are passed"
        )
    return [*zip(here, pool_blocks(memory.span, columns, first, end, num_passed), strict=True)]
