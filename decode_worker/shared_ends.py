"""Which blocks of best effort (BE) real time (RT) has a part of, and which tokens of BE had to make way for it. Pure:
it only counts, and says what the engine is to do.

RT fills a block from the first slot up, BE from the last slot down. A block of BE is lent to RT that finds no free one,
and is both's from then on. RT that needs a slot in which a token of BE lies has it: BE's tokens in the way, the newest
of that block, are copied to host memory before (they are *away*), and BE does not run until they are back. A block is
RT's alone once RT has filled it: BE has a *hole* there then. BE that runs into RT, or gets its tokens back, has a fresh
block instead.

A lender's first block is never lent: whoever has to leave the instance has KV to leave with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import islice

from alignedserve.decode_worker.plan import Checkpoint, EndOp, GiveUp, Lend, Renew, Restore
from alignedserve.decode_worker.scheduled_request import ScheduledRequest
from alignedserve.types import RequestKey


@dataclass(eq=False, slots=True)
class Loan:
    lender: ScheduledRequest
    # The block's index among the lender's blocks.
    index: int
    borrower: ScheduledRequest
    # The block's index among the borrower's blocks.
    at: int
    # The number of the block's first slots that the borrower has written, or writes in the iteration that is planned.
    num_used: int = 0


class SharedEnds:
    def __init__(self, block_size: int, max_parts: int) -> None:
        """`max_parts`: the number of blocks that host memory has room for. A loan has room for all that it may
        overwrite; 0: nothing is lent."""
        self._block_size = block_size
        self._max_parts = max_parts
        # By lender and index, and by borrower and index.
        self._lent: dict[RequestKey, dict[int, Loan]] = {}
        self._borrowed: dict[RequestKey, dict[int, Loan]] = {}
        # By lender and index: the tokens of that block which are away, as first and end within the block.
        self._away: dict[RequestKey, dict[int, tuple[int, int]]] = {}
        self._holes: dict[RequestKey, set[int]] = {}
        self._number = 0
        self._overwritten: set[RequestKey] = set()
        # What the engine is to do before the iteration that is planned, in order.
        self.ops: list[EndOp] = []

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
        """The number of blocks in host memory that are taken, or may be needed."""
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
        """Lends so many blocks, which are the borrower's last ones: those with the most empty slots first. Of full
        ones, those of BE that misses tokens anyway, and then of the longest; each lender's last ones first."""
        lenders = [each for each in running if not each.is_rt and each.last_run != self._number]
        # Of each lender the next block comes after the one before it: it is as full, or fuller.
        in_order = merge(*(self._offers(each) for each in lenders), key=lambda offer: self._place(*offer))
        for at, (lender, index) in enumerate([*islice(in_order, count)], start=borrower.num_blocks - count):
            loan = Loan(lender, index, borrower, at)
            self._lent.setdefault(lender.key, {})[index] = loan
            self._borrowed.setdefault(borrower.key, {})[at] = loan
            lender.shares = borrower.shares = True
            self.ops.append(Lend(borrower.key, lender.key, index, at))

    def _offers(self, lender: ScheduledRequest) -> Iterator[tuple[ScheduledRequest, int]]:
        taken = self._taken(lender) if lender.shares else set()
        for index in range(lender.num_blocks - 1, 0, -1):
            if index not in taken:
                yield lender, index

    def _taken(self, lender: ScheduledRequest) -> set[int]:
        """The indices of blocks that are lent, that have tokens which are away, or that are holes."""
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
        """Whether the borrower may write its tokens up to this one into blocks that were lent. Not while the lender's
        KV is being copied, and not where the lender writes in the same iteration."""
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
                self.ops.append(GiveUp(loan.lender.key, loan.index))
                self._end(loan)

    def _send_away(self, loan: Loan, first: int, end: int) -> None:
        parts = self._away.setdefault(loan.lender.key, {})
        parts[loan.index] = (first, parts[loan.index][1] if loan.index in parts else end)
        self._overwritten.add(loan.lender.key)
        self.ops.append(Checkpoint(loan.lender.key, loan.index, first, end))

    def _used(self, loan: Loan, num_tokens: int) -> int:
        return min(max(num_tokens - loan.at * self._block_size, 0), self._block_size)

    def _num_here(self, lender: ScheduledRequest, index: int) -> int:
        """The number of the lender's tokens that lie in its block."""
        part = self._away.get(lender.key, {}).get(index)
        num_cached = lender.num_cached - index * self._block_size
        return part[0] if part else min(max(num_cached, 0), self._block_size)

    def _loans_of(self, borrower: ScheduledRequest) -> list[Loan]:
        return [*self._borrowed.get(borrower.key, {}).values()]

    # ---- BE writes ---------------------------------------------------------------------------------------------------

    def renewed(self, lender: ScheduledRequest, num_tokens: int) -> list[int]:
        """The indices of blocks that the lender needs fresh ones for, to compute its tokens up to this one."""
        loans, away = self._lent.get(lender.key, {}), self._away.get(lender.key, {})
        num_blocks = -(-num_tokens // self._block_size)
        holes = [index for index in self._holes.get(lender.key, ()) if index < num_blocks]
        return sorted(
            [*holes, *(i for i, loan in loans.items() if i in away or self._collides(loan, num_tokens))]
        )

    def num_renewed_at_most(self, lender: ScheduledRequest, num_tokens: int) -> int:
        """Whatever its borrowers write before."""
        indices = {*self._lent.get(lender.key, ()), *self._holes.get(lender.key, ())}
        return sum(index * self._block_size < num_tokens for index in indices)

    def _collides(self, loan: Loan, num_tokens: int) -> bool:
        num_own = min(num_tokens - loan.index * self._block_size, self._block_size)
        return num_own > 0 and num_own + loan.num_used > self._block_size

    def can_complete(self, lender: ScheduledRequest) -> bool:
        """Whether what it misses may come back in this iteration: it was not in the way a moment ago."""
        return lender.key not in self._overwritten

    def complete(self, lender: ScheduledRequest, indices: Iterable[int]) -> None:
        """Gives the lender fresh blocks, and all its tokens back."""
        for index in indices:
            self.ops.append(Renew(lender.key, index))
            if loan := self._lent.get(lender.key, {}).get(index):
                self._end(loan)
            self._holes.get(lender.key, set()).discard(index)
        for index, (first, end) in self._away.pop(lender.key, {}).items():
            self.ops.append(Restore(lender.key, index, first, end))
        self._tidy(lender)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def num_not_freed(self, request: ScheduledRequest) -> int:
        """The number of its blocks that it does not have alone, or not at all."""
        lent, borrowed = self._lent.get(request.key, ()), self._borrowed.get(request.key, ())
        return len(lent) + len(borrowed) + len(self._holes.get(request.key, ()))

    def leave(self, request: ScheduledRequest) -> None:
        """The request has no blocks here any more; whoever shares one with it keeps that."""
        for loan in (*self._lent.get(request.key, {}).values(), *self._loans_of(request)):
            self._end(loan)
        self._away.pop(request.key, None)
        self._holes.pop(request.key, None)
        self._tidy(request)

    def num_whole(self, lender: ScheduledRequest) -> int:
        """The number of the lender's first tokens of which none is away."""
        parts = self._away.get(lender.key, {})
        return min(
            (index * self._block_size + first for index, (first, _) in parts.items()),
            default=lender.num_cached,
        )

    def cut(self, lender: ScheduledRequest, num_blocks: int) -> int:
        """Leaves the lender its first blocks, none of which is a hole, and forgets what is away. Returns the number of
        blocks that become free."""
        self._away.pop(lender.key, None)
        holes = self._holes.pop(lender.key, set())
        num_freed = 0
        for index in range(num_blocks, lender.num_blocks):
            if loan := self._lent.get(lender.key, {}).get(index):
                self._end(loan)
            elif index not in holes:
                num_freed += 1
        self._tidy(lender)
        return num_freed

    def _end(self, loan: Loan) -> None:
        """The block belongs to one of the two from here on."""
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
        """The number of blocks that two requests have."""
        return sum(map(len, self._lent.values()))

    @property
    def num_left(self) -> int:
        return len(self._lent) + len(self._borrowed) + len(self._away) + len(self._holes)
