"""The KV blocks of an instance: which are free, and which ones each owner holds. Pure: it has ids, and no bytes.

The schedule owns it, and its plans change it at once: `reserve` promises blocks, and `settle` gives them when the plan
is complete. So prompts that start in one plan find what they share, before any of them takes a block that another
would find. Only a plan that shares blocks from both ends settles earlier, because the ends need places. An engine only
reads which blocks a request has (`kv/held.py`).

A full block may be published under the hash of all tokens up to its end (`scheduling/prefixes.py`). Several owners
can then hold it. After its last owner has released it, it is kept: it counts as free but is taken last. A request with
its hash can hold it again until then.

There are two ways to count free blocks. If `counts_once` is set, a block with several owners counts once: the number
that a request takes or frees depends on the others (`num_shared`, `num_held`). Otherwise it counts once for each of
its owners, as if nothing were shared.

A block may also have two owners that fill it from both ends. Neither of them publishes it, and it counts once. When one
of them has left or has given it up, it belongs to the other one alone.

An owner has columns of blocks, one block for each layer group (`kv/span.py`). With a window, its first columns
may be passed: NO_BLOCK stands in their places in the sliding groups.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, takewhile, zip_longest

from alignedserve.kv.held import NO_BLOCK, Held
from alignedserve.kv.span import KvSpan
from alignedserve.types import BlockId


class BlockManager:
    def __init__(self, num_blocks: int, span: KvSpan | None = None, counts_once: bool = False) -> None:
        self.num_blocks = num_blocks
        # A stack: the block freed last is used next, while a processor cache may still have it.
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]
        # In no order.
        self._owners: dict[Held, None] = {}
        # Owners that are promised blocks, in the order in which they get them, and the number of these blocks.
        self._promised: dict[Held, None] = {}
        self._num_promised = 0
        # By layer group.
        self._published: list[dict[bytes, BlockId]] = []
        self._hashes: dict[BlockId, tuple[int, bytes]] = {}
        # Blocks with hashes but without owners. The one that lost its owner first is taken first.
        self._kept: dict[BlockId, None] = {}
        # The number of each block's owners beyond the first.
        self._others: Counter[BlockId] = Counter()
        self._num_others = 0
        # For some owners, the number of their blocks that others hold as well.
        self._num_shared_by: dict[Held, int] = {}
        # The same for `num_read_by_others`.
        self._num_read_by_others: dict[Held, float] = {}
        # Blocks that two owners fill from both ends.
        self._at_both_ends: set[BlockId] = set()
        # Whether any block ever had two.
        self.has_lent = False
        self.count_as(span or KvSpan(block_size=1), counts_once)

    def count_as(self, span: KvSpan, counts_once: bool) -> None:
        """Takes the span of all owners from here on, and how shared blocks count. Raises RuntimeError while an owner
        holds blocks. What is kept stays. With a window, each owner counts: one that passes a shared block gets another
        block at once, although none becomes free."""
        if self._owners:
            raise RuntimeError(f"{len(self._owners)} owners hold blocks, and their span is to change")
        self.span, self.counts_once = span, counts_once and not span.window
        # Whether an owner has exactly one block per column.
        self._is_plain = not span.window and span.num_groups == 1
        if len(self._published) != span.num_groups:
            self._published = [{} for _ in range(span.num_groups)]

    @property
    def num_free(self) -> int:
        num_free = len(self._free) + len(self._kept) - self._num_promised
        return num_free if self.counts_once else num_free - self._num_others

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def in_columns(self, held: Held, first: int = 0, end: int | None = None) -> list[BlockId]:
        """The blocks of these columns, column by column. NO_BLOCK stands for those that the owner does not hold."""
        groups = [blocks[first:end] for blocks in held.groups]
        return groups[0] if len(groups) == 1 else _column_by_column(groups)

    # ---- what owners get and free ------------------------------------------------------------------------------------

    def num_missing(self, held: Held, num_columns: int, num_passed: int = 0) -> int:
        """The number of blocks that `reserve` would promise; negative if the owner has more."""
        if self._is_plain:
            return num_columns - held.num_blocks
        num_passed = held.num_passed if held.groups else num_passed
        return self.span.num_blocks(num_passed, num_columns) - held.num_blocks

    def reserve(self, held: Held, num_columns: int, num_passed: int = 0) -> bool:
        """Promises the owner blocks for its first columns, as far as the span requires, beyond those that it has.

        Returns False and changes nothing if too few are free. `num_passed` applies to an owner that holds nothing yet.
        """
        num_columns = max(num_columns, held.num_columns)
        count = self.num_missing(held, num_columns, num_passed)
        if count > 0 and count > self.num_free:
            return False
        if not held.groups:
            self._begin(held, num_passed)
        held.num_columns = held.end = num_columns
        if not self._is_plain:
            held.end = self.span.end(held.num_passed, num_columns)
        if count > 0:
            held.num_blocks += count
            self._num_promised += count
            self._promised[held] = None
        return True

    def settle(self) -> None:
        """Gives all owners what they are promised."""
        for held in self._promised:
            self._num_promised -= self._num_lacking(held)
            ends = self._ends(held)
            missing = sum(max(end - len(blocks), 0) for blocks, end in zip(held.groups, ends, strict=True))
            if len(ends) == 1:
                held.groups[0] += self._take(missing)
            else:
                _spread(self._take(missing), held.groups, ends)
        self._promised.clear()

    def grow(self, held: Held, num_columns: int, num_passed: int = 0) -> bool:
        """Reserves and gives at once, for callers without plans."""
        fits = self.reserve(held, num_columns, num_passed)
        self.settle()
        return fits

    def free(self, held: Held) -> None:
        """Frees all blocks that the owner holds or is promised. Safe to repeat."""
        if not held.groups:
            return
        if held in self._promised:
            self._num_promised -= self._num_lacking(held)
            del self._promised[held]
        del self._owners[held]
        groups, held.groups = held.groups, []
        held.num_blocks = held.num_columns = held.num_passed = held.end = held.num_shared = 0
        self._put_back(groups[0] if len(groups) == 1 else _column_by_column(groups))

    def _begin(self, held: Held, num_passed: int) -> None:
        held.groups, held.num_passed = [[] for _ in range(self.span.num_groups)], num_passed
        for blocks in held.groups[self.span.num_full_groups :]:
            blocks += [NO_BLOCK] * num_passed
        self._owners[held] = None

    def _num_lacking(self, held: Held) -> int:
        """The number of blocks that the owner is promised and does not have yet."""
        if self._is_plain:
            return held.num_blocks - len(held.groups[0])
        num_full = self.span.num_full_groups
        num_here = sum(map(len, held.groups[:num_full]))
        num_here += sum(max(len(blocks) - held.num_passed, 0) for blocks in held.groups[num_full:])
        return held.num_blocks - num_here

    def _ends(self, held: Held) -> list[int]:
        return [held.num_columns] * self.span.num_full_groups + [held.end] * self.span.num_sliding_groups

    def _take(self, count: int) -> list[BlockId]:
        if count == 0:
            return []
        if count > len(self._free):
            self._take_kept(count - len(self._free))
        blocks = self._free[-count:][::-1]
        del self._free[-count:]
        return blocks

    # ---- blocks with two ends ---------------------------------------------------------------------------------------

    def lend(self, borrower: Held, lender: Held, index: int) -> None:
        """Makes the lender's block the borrower's next one, too."""
        self.settle()
        block = lender.groups[0][index]
        if block == NO_BLOCK or block in self._at_both_ends or block in self._others:
            raise RuntimeError(f"block {index} is lent, and the lender is not its only owner")
        if not borrower.groups:
            self._begin(borrower, 0)
        self._at_both_ends.add(block)
        self.has_lent = True
        borrower.groups[0].append(block)
        borrower.num_blocks = borrower.num_columns = borrower.end = len(borrower.groups[0])

    def give_up(self, held: Held, index: int) -> None:
        """Gives up a block with two owners. It then belongs to the other one alone."""
        self._at_both_ends.remove(held.groups[0][index])
        held.groups[0][index] = NO_BLOCK

    def renew(self, held: Held, index: int) -> tuple[BlockId, BlockId]:
        """Gives the owner a fresh block for one that it has given up, or gives up now. Returns the old block, which may
        be NO_BLOCK, and the new one."""
        self.settle()
        old = held.groups[0][index]
        if old != NO_BLOCK:
            self.give_up(held, index)
        if not self.num_free:
            raise RuntimeError(f"a fresh block {index} is planned, and none is free")
        (held.groups[0][index],) = self._take(1)
        return old, held.groups[0][index]

    def cut(self, held: Held, num_columns: int) -> None:
        """Keeps the owner's first blocks, and frees the others."""
        self.settle()
        blocks = held.groups[0]
        self._put_back(blocks[num_columns:])
        del blocks[num_columns:]
        held.num_blocks = held.num_columns = held.end = num_columns

    def _put_back(self, blocks: Sequence[BlockId]) -> None:
        if self.has_lent:
            alone = [block for block in blocks if block != NO_BLOCK and block not in self._at_both_ends]
            self._at_both_ends.difference_update(blocks)
            blocks = alone
        elif self.span.window or self.span.num_groups > 1:
            blocks = [block for block in blocks if block != NO_BLOCK]
        if self._hashes or self._others:
            self._leave(blocks)
        else:
            self._free.extend(reversed(blocks))

    # ---- blocks behind the window ------------------------------------------------------------------------------------

    def free_passed(self, held: Held, num_passed: int, num_tokens: int = 0) -> None:
        """Frees the sliding groups' blocks of columns that the owner has passed since, and promises it others in their
        place if it needs more: never more than it frees. `num_tokens`: the owner's tokens."""
        first, held.num_passed = held.num_passed, num_passed
        sliding = held.groups[self.span.num_full_groups :]
        self._put_back(_column_by_column([blocks[first:num_passed] for blocks in sliding]))
        for blocks in sliding:
            blocks[first:num_passed] = [NO_BLOCK] * (num_passed - first)
        held.num_blocks -= len(sliding) * (num_passed - first)
        if not self.reserve(held, self.span.columns_after_passing(held.num_columns, num_tokens)):
            raise RuntimeError(f"{num_passed} columns are passed, and no block is free in their place")

    # ---- blocks with hashes -----------------------------------------------------------------------------------------

    def share(self, held: Held, block_hashes: Sequence[bytes], num_passed: int | None = None) -> int:
        """Lets an owner that holds no blocks yet hold the blocks of the leading hashes, as far as they are known.

        Returns the number of hashes found. Their passed columns are not held. If shared blocks count for each owner,
        fewer are shared if not all of them fit. `num_passed`: see `num_known`.
        """
        if held.groups:
            raise RuntimeError(f"{held.num_blocks} blocks are held before any are shared")
        num_known = self.num_known(block_hashes, num_passed)
        if not self.counts_once and self._num_in_columns(num_known, num_passed) > self.num_free:
            num_fitting = self.num_free // self.span.num_groups
            num_known = self.num_known(block_hashes[:num_fitting], num_passed)
        if num_known:
            self._begin(held, self._num_passed(num_known) if num_passed is None else num_passed)
            for published, blocks in zip(self._published, held.groups, strict=True):
                shared = [published[each] for each in block_hashes[len(blocks) : num_known]]
                self._add_owner(shared)
                blocks += shared
            held.num_shared = held.num_columns = held.end = num_known
            held.num_blocks = self._num_in_columns(num_known, num_passed)
        return num_known

    @property
    def num_repeated(self) -> int:
        """The number of blocks that would be in use in addition, if each owner had its own; 0 if each owner counts."""
        return self._num_others if self.counts_once else 0

    def num_shared(self, held: Held) -> int:
        """The number of the owner's blocks that others hold as well, which stay in use after it; 0 if each owner
        counts."""
        if not (self.counts_once and self._others):
            return 0
        if held not in self._num_shared_by:
            self._num_shared_by[held] = sum(
                block in self._others for blocks in held.groups for block in blocks
            )
        return self._num_shared_by[held]

    def num_read_by_others(self, held: Held) -> float:
        """The number of the owner's columns that others read for it, if each block is read once, and its owners take
        equal shares of that; 0 if each owner counts."""
        if not (self.counts_once and self._others and held.groups):
            return 0.0
        if held not in self._num_read_by_others:
            groups = held.groups
            self._num_read_by_others[held] = sum(map(self._shares_of_others, groups)) / len(groups)
        return self._num_read_by_others[held]

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
        return self.span.num_blocks(passed, num_known)

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
        if num_passed is not None and self.span.window:
            return self._num_known_behind(block_hashes, num_passed)
        num_full, window = self.span.num_full_groups, self.span.window
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
        in_full = _in_all(self._published[: self.span.num_full_groups])
        in_sliding = _in_all(self._published[self.span.num_full_groups :])
        there = takewhile(
            lambda column: (
                in_full(block_hashes[column]) and (column < num_passed or in_sliding(block_hashes[column]))
            ),
            range(len(block_hashes)),
        )
        return sum(1 for _ in there)

    def _num_passed(self, num_full: int) -> int:
        return self.span.num_passed(num_full * self.span.block_size)

    def publish(self, held: Held, first: int, block_hashes: Sequence[bytes]) -> None:
        """Publishes the owner's blocks, from column `first` on, under these hashes. Their KV must be complete.

        Skips a hash that another block has, and a block that is passed.
        """
        if not held.groups:
            raise RuntimeError(
                f"{len(block_hashes)} hashes are to be published, and their owner holds no blocks"
            )
        for group, (blocks, published) in enumerate(zip(held.groups, self._published, strict=False)):
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
        for held in self._owners:
            if self._num_lacking(held) and held not in self._promised:
                num_blocks = held.num_blocks - self._num_lacking(held)
                raise RuntimeError(f"an owner of {num_blocks} blocks counts {held.num_blocks}")
        if (num_lacking := sum(map(self._num_lacking, self._promised))) != self._num_promised:
            raise RuntimeError(f"{self._num_promised} blocks are counted as promised, and {num_lacking} are")
        groups = [blocks for held in self._owners for blocks in held.groups]
        blocks = [block for blocks in groups for block in blocks if block != NO_BLOCK]
        num_held = len(blocks) - len(self._at_both_ends) - self.num_repeated + self._num_promised
        if num_held + self.num_free != self.num_blocks:
            raise RuntimeError(
                f"blocks leaked: {num_held} held + {self.num_free} free != {self.num_blocks} in all"
            )
        idle = [*self._free, *self._kept]
        num_distinct = len({*idle, *blocks})
        if num_distinct != self.num_blocks or len({*blocks}) + len(idle) != self.num_blocks:
            raise RuntimeError(f"blocks held twice: {num_distinct} distinct of {self.num_blocks}")

    def check_owners(self, owners: Iterable[Held]) -> None:
        """Raises RuntimeError unless these are the owners of all blocks, and the counts agree."""
        self.check()
        known = {*owners}
        if known != self._owners.keys():
            raise RuntimeError(f"{len(self._owners)} owners hold blocks, and {len(known)} are to hold some")


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
