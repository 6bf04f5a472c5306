"""Which blocks real time (RT) shares with best effort (BE), and which tokens of BE it has displaced. Pure: it lists
the copies that the engine makes.

RT fills a block from the first slot up, BE from the last slot down. When RT finds no free block, a block of BE is lent
to it, and both then share it. If RT needs a slot with a BE token, the BE tokens in the way, the newest of that block,
are first copied to host memory. They are then *away*, and BE does not run until they are back. Once RT has filled the
block, it belongs to RT alone, and BE has a *hole* there. When BE runs into RT, or gets its tokens back, it gets a new
block instead.

A lender's first block is never lent, so a lender that must leave the instance always has KV to save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import islice

from alignedserve.decode_worker.scheduled_request import ScheduledRequest
from alignedserve.instance.memory import BlockManager
from alignedserve.kv.end_copies import Checkpoint, EndCopy, Renew, Restore
from alignedserve.types import RequestKey


@dataclass(eq=False, slots=True)
class Loan:
    lender: ScheduledRequest
    # Index of the block among the lender's blocks.
    index: int
    borrower: ScheduledRequest
    # Index of the block among the borrower's blocks.
    at: int
    # First slots of the block that the borrower has written, or writes in the planned iteration.
    num_used: int = 0


class SharedEnds:
    def __init__(self, block_size: int, max_parts: int, memory: BlockManager) -> None:
        """`max_parts`: the number of blocks that fit in host memory. Each loan reserves room for everything that it may
        overwrite. With 0, nothing is lent."""
        self._block_size = block_size
        self._max_parts = max_parts
        self._memory = memory
        # By lender and index, and by borrower and index.
        self._lent: dict[RequestKey, dict[int, Loan]] = {}
        self._borrowed: dict[RequestKey, dict[int, Loan]] = {}
        # By lender and index: the range of the block's tokens that are away, as first and end within the block.
        self._away: dict[RequestKey, dict[int, tuple[int, int]]] = {}
        self._holes: dict[RequestKey, set[int]] = {}
        self._number = 0
        self._overwritten: set[RequestKey] = set()
        # The copies before the planned iteration, in order.
        self.ops: list[EndCopy] = []

    def begin(self, number: int) -> None:
        """Begins the plan of the iteration with this number."""
        self._number = number
        self._overwritten.clear()
        self.ops = []

    @property
    def is_on(self) -> bool:
        return self._max_parts > 0

    @property
    def num_parts(self) -> int:
        """The number of blocks in host memory that are used or reserved."""
        away = sum(len(parts.keys() - self._lent.get(key, {}).keys()) for key, parts in self._away.items())
        return away + sum(map(len, self._lent.values()))

    def misses_kv(self, request: ScheduledRequest) -> bool:
        return request.key in self._away

    def num_away(self, request: ScheduledRequest) -> int:
        return sum(end - first for first, end in self._away.get(request.key, {}).values())

    # ---- lending -----------------------------------------------------------------------------------------------------

    def num_lendable(self, running: Iterable[ScheduledRequest]) -> int:
        if not self.is_on:
            return 0
        num_blocks = sum(self._num_lendable_of(each) for each in running if not each.is_rt)
        return min(num_blocks, self._max_parts - self.num_parts)

    def _num_lendable_of(self, lender: ScheduledRequest) -> int:
        if lender.last_run == self._number or not lender.num_blocks:
            return 0
        return lender.num_blocks - 1 - (len(self._taken(lender)) if lender.shares else 0)

    def lend(self, running: Iterable[ScheduledRequest], borrower: ScheduledRequest, count: int) -> None:
        """Lends `count` blocks, which become the borrower's last ones. Those with the most empty slots are lent first.
        Among full ones, those of BE with tokens away come first, then those of the longest. Each lender lends its last
        blocks first."""
        lenders = [each for each in running if not each.is_rt and each.last_run != self._number]
        # Each lender's blocks are offered in order: every next one is at least as full.
        in_order = merge(*(self._offers(each) for each in lenders), key=lambda offer: self._place(*offer))
        for lender, index in [*islice(in_order, count)]:
            at = borrower.num_blocks
            self._memory.lend(borrower, lender, index)
            loan = Loan(lender, index, borrower, at)
            self._lent.setdefault(lender.key, {})[index] = loan
            self._borrowed.setdefault(borrower.key, {})[at] = loan
            lender.shares = borrower.shares = True

    def _offers(self, lender: ScheduledRequest) -> Iterator[tuple[ScheduledRequest, int]]:
        taken = self._taken(lender) if lender.shares else set()
        for index in range(lender.num_blocks - 1, 0, -1):
            if index not in taken:
                yield lender, index

    def _taken(self, lender: ScheduledRequest) -> set[int]:
        """Returns the indices of blocks that are lent, have tokens away, or are holes."""
        return {
            *self._lent.get(lender.key, ()),
            *self._away.get(lender.key, ()),
            *self._holes.get(lender.key, ()),
        }

    def _place(self, lender: ScheduledRequest, index: int) -> tuple[int, bool, int, RequestKey, int]:
        num_tokens = self._num_here(lender, index)
        return num_tokens, not self.misses_kv(lender), -lender.num_tokens, lender.key, -index

    # ---- RT writes ---------------------------------------------------------------------------------------------------

    def can_use(self, borrower: ScheduledRequest, num_tokens: int, running: Iterable[RequestKey]) -> bool:
        """Whether the borrower may write its first `num_tokens` tokens into lent blocks. It may not while the lender's
        KV is being copied, or if the lender writes in the same iteration."""
        return all(
            self._may_use(loan, self._used(loan, num_tokens), running) for loan in self._loans_of(borrower)
        )

    def _may_use(self, loan: Loan, num_used: int, running: Iterable[RequestKey]) -> bool:
        if num_used <= loan.num_used:
            return True
        if loan.lender.last_run == self._number:
            return False
        is_free = num_used + self._num_here(loan.lender, loan.index) <= self._block_size
        return is_free or loan.lender.key in running

    def use(self, borrower: ScheduledRequest, num_tokens: int) -> None:
        for loan in self._loans_of(borrower):
            loan.num_used = max(loan.num_used, self._used(loan, num_tokens))
            num_here = self._num_here(loan.lender, loan.index)
            num_left = min(num_here, self._block_size - loan.num_used)
            if num_left < num_here:
                self._send_away(loan, num_left, num_here)
            if loan.num_used == self._block_size:
                self._holes.setdefault(loan.lender.key, set()).add(loan.index)
                self._memory.give_up(loan.lender, loan.index)
                self._end(loan)

    def _send_away(self, loan: Loan, first: int, end: int) -> None:
        parts = self._away.setdefault(loan.lender.key, {})
        parts[loan.index] = (first, parts[loan.index][1] if loan.index in parts else end)
        self._overwritten.add(loan.lender.key)
        block = loan.lender.blocks[loan.index]
        self.ops.append(Checkpoint(loan.lender.key, loan.index, block, first, end))

    def _used(self, loan: Loan, num_tokens: int) -> int:
        return min(max(num_tokens - loan.at * self._block_size, 0), self._block_size)

    def _num_here(self, lender: ScheduledRequest, index: int) -> int:
        """Returns the number of the lender's tokens in its block."""
        part = self._away.get(lender.key, {}).get(index)
        num_cached = lender.num_cached - index * self._block_size
        return part[0] if part else min(max(num_cached, 0), self._block_size)

    def _loans_of(self, borrower: ScheduledRequest) -> list[Loan]:
        return [*self._borrowed.get(borrower.key, {}).values()]

    # ---- BE writes ---------------------------------------------------------------------------------------------------

    def renewed(self, lender: ScheduledRequest, num_tokens: int) -> list[int]:
        """Returns the indices for which the lender needs new blocks to compute its first `num_tokens` tokens."""
        loans, away = self._lent.get(lender.key, {}), self._away.get(lender.key, {})
        num_blocks = -(-num_tokens // self._block_size)
        holes = [index for index in self._holes.get(lender.key, ()) if index < num_blocks]
        return sorted(
            [*holes, *(i for i, loan in loans.items() if i in away or self._collides(loan, num_tokens))]
        )

    def num_renewed_at_most(self, lender: ScheduledRequest, num_tokens: int) -> int:
        """Returns an upper bound of that number, whatever the borrowers write before."""
        indices = {*self._lent.get(lender.key, ()), *self._holes.get(lender.key, ())}
        return sum(index * self._block_size < num_tokens for index in indices)

    def _collides(self, loan: Loan, num_tokens: int) -> bool:
        num_own = min(num_tokens - loan.index * self._block_size, self._block_size)
        return num_own > 0 and num_own + loan.num_used > self._block_size

    def can_complete(self, lender: ScheduledRequest) -> bool:
        """Whether the lender's missing tokens may return in this iteration. They may not if it has just overwritten
        some."""
        return lender.key not in self._overwritten

    def complete(self, lender: ScheduledRequest, indices: Iterable[int]) -> None:
        """Gives the lender new blocks and all its tokens."""
        for index in indices:
            self.ops.append(Renew(lender.key, index, *self._memory.renew(lender, index)))
            if loan := self._lent.get(lender.key, {}).get(index):
                self._end(loan)
            self._holes.get(lender.key, set()).discard(index)
        for index, (first, end) in self._away.pop(lender.key, {}).items():
            self.ops.append(Restore(lender.key, index, lender.blocks[index], first, end))
        self._tidy(lender)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def num_not_freed(self, request: ScheduledRequest) -> int:
        """Returns the number of its blocks that it shares or no longer has."""
        lent, borrowed = self._lent.get(request.key, ()), self._borrowed.get(request.key, ())
        return len(lent) + len(borrowed) + len(self._holes.get(request.key, ()))

    def leave(self, request: ScheduledRequest) -> None:
        """Removes the request's blocks. Shared ones stay with the other request."""
        for loan in (*self._lent.get(request.key, {}).values(), *self._loans_of(request)):
            self._end(loan)
        self._away.pop(request.key, None)
        self._holes.pop(request.key, None)
        self._tidy(request)

    def num_whole(self, lender: ScheduledRequest) -> int:
        """Returns the number of the lender's first tokens before the first one that is away."""
        parts = self._away.get(lender.key, {})
        return min(
            (index * self._block_size + first for index, (first, _) in parts.items()),
            default=lender.num_cached,
        )

    def cut(self, lender: ScheduledRequest, num_blocks: int) -> None:
        """Reduces the lender to its first blocks, none of which is a hole, and forgets the tokens that are away."""
        self._away.pop(lender.key, None)
        self._holes.pop(lender.key, None)
        for index in range(num_blocks, lender.num_blocks):
            if loan := self._lent.get(lender.key, {}).get(index):
                self._end(loan)
        self._tidy(lender)

    def _end(self, loan: Loan) -> None:
        """Ends the loan. The block now belongs to one of the two."""
        del self._lent[loan.lender.key][loan.index]
        del self._borrowed[loan.borrower.key][loan.at]
        self._tidy(loan.lender)
        self._tidy(loan.borrower)

    def _tidy(self, request: ScheduledRequest) -> None:
        tables = (self._lent, self._borrowed, self._away, self._holes)
        for table in tables:
            if request.key in table and not table[request.key]:
                del table[request.key]
        request.shares = any(request.key in table for table in tables)

    def check(self) -> None:
        loans = [loan for lent in self._lent.values() for loan in lent.values()]
        if len(loans) != sum(map(len, self._borrowed.values())) or self.num_parts > self._max_parts:
            raise RuntimeError(
                f"{len(loans)} loans, {sum(map(len, self._borrowed.values()))} of them borrowed; "
                f"{self.num_parts} parts of blocks for {self._max_parts} in host memory"
            )

    @property
    def num_loans(self) -> int:
        """The number of blocks that two requests share."""
        return sum(map(len, self._lent.values()))

    @property
    def num_left(self) -> int:
        return len(self._lent) + len(self._borrowed) + len(self._away) + len(self._holes)
