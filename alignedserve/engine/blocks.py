"""Which requests hold which KV blocks of an instance. Ids and counts only; the bytes are in `kv_cache`.

A full block may be published under the hash of all tokens up to its end (`scheduling/block_hashes.py`), and then
several owners can hold it. When the last owner has gone it is kept: it is free like others, but taken last, and a
request with its hash that comes before that holds it again.

Free blocks are counted as if nothing were shared: a block counts once for each of its owners. So a plan that goes by
counts need not know what is shared, and the blocks that it was promised are there.

A block may also have two owners that fill it from both ends, neither of which publishes it. It counts once then, and
is the other's alone when one of them has left, or has given it up.

With a window (`keep_window`) an owner's first blocks may be passed: NO_BLOCK stands in their places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from alignedserve.protocol.kv_span import KvSpan
from alignedserve.types import BlockId, RequestId

# In place of a block that its owner has given up, or passed.
NO_BLOCK = BlockId(-1)


class BlockManager:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._span: KvSpan | None = None
        self.reset()

    def keep_window(self, span: KvSpan) -> None:
        self._span = span

    def reset(self) -> None:
        """Frees every block, whatever holds it."""
        # It is a stack: the block freed last is used next, while it is still in a processor cache.
        self._free = [BlockId(block) for block in reversed(range(self.num_blocks))]
        self._held: dict[RequestId, list[BlockId]] = {}
        self._published: dict[bytes, BlockId] = {}
        self._hashes: dict[BlockId, bytes] = {}
        # These blocks have hashes and no owner; the one that lost its owner first is taken first.
        self._kept: dict[BlockId, None] = {}
        # The number of owners of each block beyond the first.
        self._others: Counter[BlockId] = Counter()
        self._num_others = 0
        # The blocks that two owners fill from both ends.
        self._at_both_ends: set[BlockId] = set()
        self._has_lent = False

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._kept) - self._num_others

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def held(self, owner: RequestId) -> list[BlockId]:
        return self._held.get(owner, [])

    def allocate(self, owner: RequestId, count: int) -> list[BlockId] | None:
        """Allocates `count` more blocks for `owner`. Returns None and changes nothing if fewer are free."""
        if count > self.num_free:
            return None
        if count == 0:
            return []
        if count > len(self._free):
            self._take_kept(count - len(self._free))
        blocks = self._free[-count:][::-1]
        del self._free[-count:]
        self._held.setdefault(owner, []).extend(blocks)
        return blocks

    def free(self, owner: RequestId) -> None:
        """Frees all blocks that `owner` holds; safe to repeat."""
        self._put_back(self._held.pop(owner, []))

    # ---- blocks with two ends ---------------------------------------------------------------------------------------

    def lend(self, borrower: RequestId, lender: RequestId, index: int) -> BlockId:
        """Makes the lender's block the borrower's next one as well."""
        block = self._held[lender][index]
        if block == NO_BLOCK or block in self._at_both_ends or block in self._others:
            raise RuntimeError(
                f"{borrower}: is lent block {index} of {lender}, which {lender} does not have alone"
            )
        self._at_both_ends.add(block)
        self._has_lent = True
        self._held.setdefault(borrower, []).append(block)
        return block

    def give_up(self, owner: RequestId, index: int) -> None:
        """Leaves a block that two have to the other one."""
        self._at_both_ends.remove(self._held[owner][index])
        self._held[owner][index] = NO_BLOCK

    def renew(self, owner: RequestId, index: int) -> tuple[BlockId, BlockId]:
        """Gives the owner a fresh block in place of one that it has given up, or that it leaves to the other one.
        Returns the old one, which may be NO_BLOCK, and the new one."""
        old = self._held[owner][index]
        if old != NO_BLOCK:
            self.give_up(owner, index)
        new = self.allocate(owner, 1)
        if new is None:
            raise RuntimeError(f"{owner}: planned a fresh block {index}, and none is free")
        self._held[owner].pop()
        self._held[owner][index] = new[0]
        return old, new[0]

    def cut(self, owner: RequestId, num_blocks: int) -> None:
        """Leaves the owner its first blocks, and frees the others."""
        blocks = self._held[owner]
        self._put_back(blocks[num_blocks:])
        del blocks[num_blocks:]

    def _put_back(self, blocks: Sequence[BlockId]) -> None:
        if self._has_lent:
            alone = [block for block in blocks if block != NO_BLOCK and block not in self._at_both_ends]
            self._at_both_ends.difference_update(blocks)
            blocks = alone
        elif self._span:
            blocks = [block for block in blocks if block != NO_BLOCK]
        if self._hashes or self._others:
            self._leave(blocks)
        else:
            self._free.extend(reversed(blocks))

    # ---- blocks behind the window ------------------------------------------------------------------------------------

    def skip(self, owner: RequestId, count: int) -> None:
        """Begins the blocks of an owner that holds none with so many passed ones."""
        if owner in self._held:
            raise RuntimeError(f"{owner}: holds {len(self._held[owner])} blocks before it skips any")
        self._held[owner] = [NO_BLOCK] * count

    def free_passed(self, owner: RequestId, num_passed: int) -> None:
        """Frees those of the owner's first blocks which it still holds."""
        blocks = self._held[owner]
        self._put_back(blocks[:num_passed])
        blocks[:num_passed] = [NO_BLOCK] * num_passed

    # ---- blocks with hashes -----------------------------------------------------------------------------------------

    def share(self, owner: RequestId, block_hashes: Sequence[bytes]) -> int:
        """Lets `owner`, which holds no blocks yet, hold the blocks of the first of these hashes, as far as they are
        known. Returns how many; those that are passed then it does not hold.

        They count like other blocks: what else is allocated to the owner has to fit, too.
        """
        if owner in self._held:
            raise RuntimeError(f"{owner}: holds {len(self._held[owner])} blocks before it shares any")
        num_known = self.num_known(block_hashes)
        if num_known - self._num_passed(num_known) > self.num_free:
            num_known = self.num_known(block_hashes[: self.num_free])
        num_passed = self._num_passed(num_known)
        blocks = [self._published[block_hash] for block_hash in block_hashes[num_passed:num_known]]
        for block in blocks:
            if block in self._kept:
                del self._kept[block]
            else:
                self._others[block] += 1
                self._num_others += 1
        if num_known:
            self._held[owner] = [NO_BLOCK] * num_passed + blocks
        return num_known

    def num_known(self, block_hashes: Sequence[bytes]) -> int:
        """The number of leading hashes for which there are blocks, those aside that are passed after so many."""
        if self._span is None:
            return sum(1 for _ in takewhile(self._published.__contains__, block_hashes))
        num_known = num_in_a_row = 0
        for count, block_hash in enumerate(block_hashes, 1):
            num_in_a_row = num_in_a_row + 1 if block_hash in self._published else 0
            if num_in_a_row and num_in_a_row >= count - self._num_passed(count):
                num_known = count
        return num_known

    def _num_passed(self, num_full: int) -> int:
        return self._span.num_passed(num_full * self._span.block_size) if self._span else 0

    def publish(self, owner: RequestId, first: int, block_hashes: Sequence[bytes]) -> None:
        """Publishes the owner's blocks from its `first` on under these hashes: their KV is there. A hash which another
        block has already is skipped, and so is a block that is passed."""
        for block, block_hash in zip(islice(self.held(owner), first, None), block_hashes, strict=False):
            if block_hash not in self._published and block != NO_BLOCK:
                self._published[block_hash], self._hashes[block] = block, block_hash

    def forget(self, block_hashes: Iterable[bytes]) -> None:
        """From here on no other owner can hold the blocks of these hashes."""
        for block_hash in block_hashes:
            if block_hash in self._published:
                block = self._published[block_hash]
                self._forget(block)
                if block in self._kept:
                    del self._kept[block]
                    self._free.append(block)

    def _leave(self, blocks: Sequence[BlockId]) -> None:
        # A prompt's last block is kept first, and so taken first: it is of no use without the blocks before it.
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
            del self._published[self._hashes.pop(block)]

    # ---- checks -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises unless every block is held, kept or free, and the counts are right."""
        held = [block for blocks in self._held.values() for block in blocks if block != NO_BLOCK]
        num_held = len(held) - len(self._at_both_ends)
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
