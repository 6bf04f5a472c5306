"""Which requests hold which KV blocks of an instance. Ids and counts only; the bytes are in `kv_cache`.

A full block may be published under the hash of all tokens up to its end (`scheduling/prefixes.py`). Several owners
can then hold it. After its last owner has released it, it is kept: it counts as free but is taken last. A request with
its hash can hold it again until then.

There are two ways to count free blocks. By default a block counts once for each of its owners, as if nothing were
shared. A plan then goes by its own counts alone. If shared blocks are counted once (`count_once`), the number that a
request takes or frees depends on the other owners, so a plan asks for it (`num_shared`, `num_held`).

A block may also have two owners that fill it from both ends. Neither of them publishes it, and it counts once. When one
of them has left or has given it up, it belongs to the other one alone.

An owner has columns of blocks, one block for each layer group (`kv/span.py`). With a window, its first columns
may be passed: NO_BLOCK stands in their places in the sliding groups.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile, zip_longest
from typing import NamedTuple

from alignedserve.kv.span import KvSpan
from alignedserve.types import BlockId, RequestId

# Stands for a block that its owner has given up or passed.
NO_BLOCK = BlockId(-1)


@dataclass(slots=True)
class Held:
    """The blocks that an owner holds, by group and column."""

    groups: list[list[BlockId]]
    # Leading columns without blocks in the sliding groups.
    num_passed: int
    # Columns promised to the owner. Sliding groups may have blocks for fewer so far.
    num_columns: int = 0


class Grown(NamedTuple):
    """The blocks that an owner got in one group. `first` is the column of the first one."""

    first: int
    blocks: list[BlockId]


class BlockManager:
    def __init__(self, num_blocks: int, span: KvSpan | None = None) -> None:
        self.num_blocks = num_blocks
        self._span = span or KvSpan(block_size=1)
        self.counts_once = False
        self.reset()

    def keep_window(self, span: KvSpan) -> None:
        self._span = span

    def count_once(self, is_on: bool) -> None:
        """With a window, each owner counts: one that passes a shared block gets another block at once, although none
        becomes free."""
        self.counts_once = is_on and not self._span.window

    def reset(self) -> None:
        """Frees every block, even if an owner holds it."""
        # A stack: the block freed last is used next, while a processor cache may still have it.
        self._free = [BlockId(block) for block in reversed(range(self.num_blocks))]
        self._held: dict[RequestId, Held] = {}
        # By layer group.
        self._published: list[dict[bytes, BlockId]] = [{} for _ in range(self._span.num_groups)]
        self._hashes: dict[BlockId, tuple[int, bytes]] = {}
        # Blocks with hashes but without owners. The one that lost its owner first is taken first.
        self._kept: dict[BlockId, None] = {}
        # The number of each block's owners beyond the first.
        self._others: Counter[BlockId] = Counter()
        self._num_others = 0
        # For some owners, the number of their blocks that others hold as well.
        self._num_shared_by: dict[RequestId, int] = {}
        # The same for `num_read_by_others`.
        self._num_read_by_others: dict[RequestId, float] = {}
        # Blocks that two owners fill from both ends.
        self._at_both_ends: set[BlockId] = set()
        self._has_lent = False

    @property
    def num_free(self) -> int:
        num_free = len(self._free) + len(self._kept)
        return num_free if self.counts_once else num_free - self._num_others

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def held(self, owner: RequestId, group: int = 0) -> list[BlockId]:
        return self._held[owner].groups[group] if owner in self._held else []

    def in_columns(self, owner: RequestId, first: int = 0, end: int | None = None) -> list[BlockId]:
        """The blocks of these columns, column by column. NO_BLOCK stands for those that the owner does not hold."""
        groups = [blocks[first:end] for blocks in self._held[owner].groups]
        return groups[0] if len(groups) == 1 else _column_by_column(groups)

    def num_missing(self, owner: RequestId, num_columns: int, num_passed: int = 0) -> int:
        """The number of blocks that `grow` would take."""
        held = self._held.get(owner)
        if held is None:
            return self._span.num_blocks(num_passed, num_columns)
        ends = self._ends(held, num_columns)
        return sum(max(end - len(blocks), 0) for blocks, end in zip(held.groups, ends, strict=True))

    def grow(self, owner: RequestId, num_columns: int, num_passed: int = 0) -> list[Grown] | None:
        """Gives the owner blocks for its first columns, as far as the span requires, beyond those that it holds.

        Returns the new blocks by group. Returns None and changes nothing if too few are free. `num_passed` applies to
        an owner that holds nothing yet.
        """
        held = self._held.get(owner)
        if held is None:
            if self.num_missing(owner, num_columns, num_passed) > self.num_free:
                return None
            held = self._begin(owner, num_passed)
        if len(held.groups) == 1:
            return self._grow_only_group(held, num_columns)
        ends, before = self._ends(held, num_columns), [len(blocks) for blocks in held.groups]
        missing = [end - first for first, end in zip(before, ends, strict=True) if end > first]
        if (count := sum(missing)) > self.num_free:
            return None
        held.num_columns = max(held.num_columns, num_columns)
        _spread(self._take(count), held.groups, ends)
        return [Grown(first, blocks[first:]) for first, blocks in zip(before, held.groups, strict=True)]

    def _grow_only_group(self, held: Held, num_columns: int) -> list[Grown] | None:
        """The same for one group, faster: each decode needs a block every few steps."""
        blocks = held.groups[0]
        first = len(blocks)
        count = self._span.end(held.num_passed, num_columns) - first
        if count > self.num_free:
            return None
        if num_columns > held.num_columns:
            held.num_columns = num_columns
        taken = self._take(max(count, 0))
        blocks += taken
        return [Grown(first, taken)]

    def allocate(self, owner: RequestId, count: int) -> list[BlockId] | None:
        """Allocates `count` more blocks for `owner` in the first group, for any use. Returns None and changes nothing
        if fewer are free."""
        if count > self.num_free:
            return None
        blocks = self._take(count)
        if blocks:
            (self._held.get(owner) or self._begin(owner, 0)).groups[0].extend(blocks)
        return blocks

    def free(self, owner: RequestId) -> None:
        """Frees all blocks that `owner` holds. Safe to repeat."""
        held = self._held.pop(owner, None)
        if held is not None:
            groups = held.groups
            self._put_back(groups[0] if len(groups) == 1 else _column_by_column(groups))

    def _begin(self, owner: RequestId, num_passed: int) -> Held:
        groups = [list[BlockId]() for _ in range(self._span.num_groups)]
        for blocks in groups[self._span.num_full_groups :]:
            blocks += [NO_BLOCK] * num_passed
        held = self._held[owner] = Held(groups, num_passed)
        return held

    def _ends(self, held: Held, num_columns: int) -> list[int]:
        span = self._span
        of_sliding = [span.end(held.num_passed, num_columns)] * span.num_sliding_groups
        return [num_columns] * span.num_full_groups + of_sliding if span.num_full_groups else of_sliding

    def _take(self, count: int) -> list[BlockId]:
        if count == 0:
            return []
        if count > len(self._free):
            self._take_kept(count - len(self._free))
        blocks = self._free[-count:][::-1]
        del self._free[-count:]
        return blocks

    # ---- blocks with two ends ---------------------------------------------------------------------------------------

    def lend(self, borrower: RequestId, lender: RequestId, index: int) -> BlockId:
        """Makes the lender's block the borrower's next one, too."""
        block = self.held(lender)[index]
        if block == NO_BLOCK or block in self._at_both_ends or block in self._others:
            raise RuntimeError(
                f"{borrower}: is lent block {index} of {lender}, but {lender} is not its only owner"
            )
        self._at_both_ends.add(block)
        self._has_lent = True
        (self._held.get(borrower) or self._begin(borrower, 0)).groups[0].append(block)
        return block

    def give_up(self, owner: RequestId, index: int) -> None:
        """Gives up a block with two owners. It then belongs to the other one alone."""
        self._at_both_ends.remove(self.held(owner)[index])
        self.held(owner)[index] = NO_BLOCK

    def renew(self, owner: RequestId, index: int) -> tuple[BlockId, BlockId]:
        """Gives the owner a fresh block for one that it has given up, or gives up now. Returns the old block, which may
        be NO_BLOCK, and the new one."""
        old = self.held(owner)[index]
        if old != NO_BLOCK:
            self.give_up(owner, index)
        new = self.allocate(owner, 1)
        if new is None:
            raise RuntimeError(f"{owner}: planned a fresh block {index}, and none is free")
        self.held(owner).pop()
        self.held(owner)[index] = new[0]
        return old, new[0]

    def cut(self, owner: RequestId, num_blocks: int) -> None:
        """Keeps the owner's first blocks, and frees the others."""
        blocks = self.held(owner)
        self._put_back(blocks[num_blocks:])
        del blocks[num_blocks:]

    def _put_back(self, blocks: Sequence[BlockId]) -> None:
        if self._has_lent:
            alone = [block for block in blocks if block != NO_BLOCK and block not in self._at_both_ends]
            self._at_both_ends.difference_update(blocks)
            blocks = alone
        elif self._span.window or self._span.num_groups > 1:
            blocks = [block for block in blocks if block != NO_BLOCK]
        if self._hashes or self._others:
            self._leave(blocks)
        else:
            self._free.extend(reversed(blocks))

    # ---- blocks behind the window ------------------------------------------------------------------------------------

    def free_passed(self, owner: RequestId, num_passed: int, num_tokens: int = 0) -> list[Grown]:
        """Frees the sliding groups' blocks of columns that the owner has passed since, and replaces them if more are
        needed.

        It allocates no more than it frees. Returns the new blocks. `num_tokens`: the owner's tokens.
        """
        held, num_full = self._held[owner], self._span.num_full_groups
        first, held.num_passed = held.num_passed, num_passed
        passed = [blocks[first:num_passed] for blocks in held.groups[num_full:]]
        self._put_back(_column_by_column(passed))
        for blocks in held.groups[num_full:]:
            blocks[first:num_passed] = [NO_BLOCK] * (num_passed - first)
        grown = self.grow(owner, self._span.columns_after_passing(held.num_columns, num_tokens))
        if grown is None:
            raise RuntimeError(f"{owner}: has passed {num_passed} columns, and none is free in their place")
        return grown

    # ---- blocks with hashes -----------------------------------------------------------------------------------------

    def share(self, owner: RequestId, block_hashes: Sequence[bytes], num_passed: int | None = None) -> int:
        """Lets `owner`, which holds no blocks yet, hold the blocks of the leading hashes, as far as they are known.

        Returns the number of hashes found. Their passed columns are not held. If shared blocks count for each owner,
        fewer are shared if not all of them fit. `num_passed`: see `num_known`.
        """
        if owner in self._held:
            raise RuntimeError(f"{owner}: holds {len(self.held(owner))} blocks before it shares any")
        num_known = self.num_known(block_hashes, num_passed)
        if not self.counts_once and self._num_in_columns(num_known, num_passed) > self.num_free:
            num_fitting = self.num_free // self._span.num_groups
            num_known = self.num_known(block_hashes[:num_fitting], num_passed)
        if num_known:
            held = self._begin(owner, self._num_passed(num_known) if num_passed is None else num_passed)
            for published, blocks in zip(self._published, held.groups, strict=True):
                shared = [published[each] for each in block_hashes[len(blocks) : num_known]]
                self._add_owner(shared)
                blocks += shared
        return num_known

    @property
    def num_repeated(self) -> int:
        """The number of blocks that would be in use in addition, if each owner had its own; 0 if each owner counts."""
        return self._num_others if self.counts_once else 0

    def num_shared(self, owner: RequestId) -> int:
        """The number of the owner's blocks that others hold as well, which stay in use after it; 0 if each owner
        counts."""
        if not (self.counts_once and self._others):
            return 0
        if owner not in self._num_shared_by:
            groups = self._held[owner].groups if owner in self._held else []
            self._num_shared_by[owner] = sum(block in self._others for blocks in groups for block in blocks)
        return self._num_shared_by[owner]

    def num_read_by_others(self, owner: RequestId) -> float:
        """The number of the owner's columns that others read for it, if each block is read once, and its owners take
        equal shares of that; 0 if each owner counts."""
        if not (self.counts_once and self._others) or owner not in self._held:
            return 0.0
        if owner not in self._num_read_by_others:
            groups = self._held[owner].groups
            self._num_read_by_others[owner] = sum(map(self._shares_of_others, groups)) / len(groups)
        return self._num_read_by_others[owner]

    def _shares_of_others(self, blocks: Sequence[BlockId]) -> float:
        """Adds up the shares that other owners have in these blocks. Unless hashes were forgotten in between, a block
        has no more owners than the one before."""
        found, first = 0.0, 0
        while first < len(blocks) and (num_others := self._others.get(blocks[first], 0)):
            end = bisect_right(blocks, -num_others, first, key=lambda block: -self._others.get(block, 0))
            found += (end - first) * num_others / (num_others + 1)
            first = end
        return found

    def num_held(self, block_hashes: Sequence[bytes], num_passed: int | None = None) -> int:
        """The number of blocks that `share` would give, and that others hold; 0 if each owner counts."""
        if not self.counts_once:
            return 0
        known = block_hashes[: self.num_known(block_hashes, num_passed)]
        return sum(published[each] not in self._kept for published in self._published for each in known)

    def _num_in_columns(self, num_known: int, num_passed: int | None) -> int:
        """The number of blocks in these columns that are not passed."""
        passed = self._num_passed(num_known) if num_passed is None else min(num_passed, num_known)
        return self._span.num_blocks(passed, num_known)

    def _add_owner(self, blocks: Iterable[BlockId]) -> None:
        self._num_shared_by.clear()
        self._num_read_by_others.clear()
        for block in blocks:
            if block in self._kept:
                del self._kept[block]
            else:
                self._others[block] += 1
                self._num_others += 1

    def num_known(self, block_hashes: Sequence[bytes], num_passed: int | None = None) -> int:
        """The number of leading hashes with blocks in all groups. Columns that are passed by then need none in sliding
        groups. `num_passed`: the columns that the owner has passed, if it gets the KV after these hashes elsewhere."""
        if num_passed is not None and self._span.window:
            return self._num_known_behind(block_hashes, num_passed)
        num_full, window = self._span.num_full_groups, self._span.window
        # If nothing is ever passed, all groups need all columns.
        always = self._published[:num_full] if window else self._published
        there = takewhile(_in_all(always), block_hashes) if always else block_hashes
        if not window:
            return sum(1 for _ in there)
        is_there, num_known, num_in_a_row = _in_all(self._published[num_full:]), 0, 0
        for count, block_hash in enumerate(there, 1):
            num_in_a_row = num_in_a_row + 1 if is_there(block_hash) else 0
            if num_in_a_row and num_in_a_row >= count - self._num_passed(count):
                num_known = count
        return num_known

    def _num_known_behind(self, block_hashes: Sequence[bytes], num_passed: int) -> int:
        in_full = _in_all(self._published[: self._span.num_full_groups])
        in_sliding = _in_all(self._published[self._span.num_full_groups :])
        there = takewhile(
            lambda column: (
                in_full(block_hashes[column]) and (column < num_passed or in_sliding(block_hashes[column]))
            ),
            range(len(block_hashes)),
        )
        return sum(1 for _ in there)

    def _num_passed(self, num_full: int) -> int:
        return self._span.num_passed(num_full * self._span.block_size)

    def publish(self, owner: RequestId, first: int, block_hashes: Sequence[bytes]) -> None:
        """Publishes the owner's blocks, from column `first` on, under these hashes. Their KV must be complete.

        Skips a hash that another block has, and a block that is passed.
        """
        groups = self._held[owner].groups if owner in self._held else []
        for group, (blocks, published) in enumerate(zip(groups, self._published, strict=False)):
            for block, block_hash in zip(islice(blocks, first, None), block_hashes, strict=False):
                if block_hash not in published and block != NO_BLOCK:
                    published[block_hash], self._hashes[block] = block, (group, block_hash)

    def forget_all(self) -> None:
        """Unpublishes all hashes: no other owner can hold their blocks from here on."""
        for published in self._published:
            published.clear()
        self._hashes.clear()
        self._free += self._kept
        self._kept.clear()

    def _leave(self, blocks: Sequence[BlockId]) -> None:
        self._num_shared_by.clear()
        self._num_read_by_others.clear()
        # A prompt's last block is kept first, so it is taken first: it is useless without the blocks before it.
        for block in reversed(blocks):
            if block in self._others:
                self._others[block] -= 1
                self._num_others -= 1
                if not self._others[block]:
                    del self._others[block]
            elif block in self._hashes:
                self._kept[block] = None
            else:
                self._free.append(block)

    def _take_kept(self, count: int) -> None:
        for block in list(islice(self._kept, count)):
            del self._kept[block]
            self._forget(block)
            self._free.append(block)

    def _forget(self, block: BlockId) -> None:
        if block in self._hashes:
            group, block_hash = self._hashes.pop(block)
            del self._published[group][block_hash]

    # ---- checks -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises RuntimeError unless every block is held, kept or free, and the counts agree."""
        groups = [blocks for held in self._held.values() for blocks in held.groups]
        held = [block for blocks in groups for block in blocks if block != NO_BLOCK]
        num_held = len(held) - len(self._at_both_ends) - self.num_repeated
        if num_held + self.num_free != self.num_blocks:
            raise RuntimeError(
                f"blocks leaked: {num_held} held + {self.num_free} free != {self.num_blocks} in all"
            )
        idle = [*self._free, *self._kept]
        num_distinct = len({*idle, *held})
        if num_distinct != self.num_blocks or len({*held}) + len(idle) != self.num_blocks:
            raise RuntimeError(f"blocks held twice: {num_distinct} distinct of {self.num_blocks}")

    def check_idle(self) -> None:
        self.check()
        if self._held:
            raise RuntimeError(f"idle, but {len(self._held)} requests hold blocks: {sorted(self._held)[:5]}")


def _in_all(published: Sequence[Mapping[bytes, BlockId]]) -> Callable[[bytes], bool]:
    """Returns a predicate: whether a hash is in all of these. It is fast, because a long prompt needs thousands of
    calls."""
    if len(published) == 1:
        return published[0].__contains__
    return lambda block_hash: all(block_hash in each for each in published)


def _spread(blocks: Iterable[BlockId], groups: Sequence[list[BlockId]], ends: Sequence[int]) -> None:
    """Appends the blocks to the groups up to these columns, column by column. The blocks of a column are then adjacent
    in memory, as they are in the pool, and move as one piece."""
    taken = iter(blocks)
    growing = [(held, end) for held, end in zip(groups, ends, strict=True) if len(held) < end]
    first = min((len(held) for held, _ in growing), default=0)
    for column in range(first, max((end for _, end in growing), default=0)):
        for held, end in growing:
            if len(held) == column < end:
                held.append(next(taken))


def _column_by_column(groups: Iterable[Sequence[BlockId]]) -> list[BlockId]:
    return [block for column in zip_longest(*groups, fillvalue=NO_BLOCK) for block in column]
