"""Assigns the pool's blocks to requests. It handles only ids, counts and hashes, and writes every change to the owner
table.

    nothing --reserve--> RESERVED --commit--> HELD --make_spare--> SPARE
                            ^                   |                    |  '-- dropped when room is needed
                            '------reserve------'------reserve-------'

A reservation that is not committed in time falls back to the last commit, as a spare. `release` ends any state.

`BlockTree` has the blocks that requests list, and those that are kept because their content is known. When room is
needed, spare requests and kept blocks go in the order in which they were last used, and of the blocks last used
together those at the ends of prompts go first. Among several owners, the one with most kept blocks loses them, though
others' may be older, so no key's prompts push out all of another's. What is promised to the next turns of chats goes
last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

from alignedserve.kv.span import KvSpan
from alignedserve.kvpool.block_tree import BlockTree
from alignedserve.kvpool.owners import Allocation, AllocationState, OwnerTable
from alignedserve.kvpool.promises import PromiseLimits
from alignedserve.kvpool.runs import Run
from alignedserve.types import PoolBlockId, RequestKey


class Grant(NamedTuple):
    # All blocks that the request now has.
    blocks: list[PoolBlockId]
    # Requests that lost their spares for it.
    dropped: list[RequestKey]
    # The number of the request's first tokens with KV in these blocks.
    num_tokens: int = 0
    # The number of tokens with KV that other requests had left.
    num_found: int = 0


class BlockAllocator:
    def __init__(
        self,
        table: OwnerTable,
        block_size: int,
        deadline_s: float,
        limits: PromiseLimits | None = None,
        span: KvSpan | None = None,
    ) -> None:
        """Starts from the table's content. Reservations found there lapse at the deadline. `span`: what requests keep
        on instances, if that is not everything."""
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: must be at least 1")
        self._table = table
        self._block_size = block_size
        self._span = span or KvSpan(block_size)
        self._allocations: dict[RequestKey, Allocation] = {}
        # In each state, in the order in which they entered it.
        self._in_state: dict[AllocationState, dict[RequestKey, Allocation]] = {
            state: {} for state in AllocationState
        }
        # Counts events: a block or a spare is the older, the lower the number at which it was last used.
        self._now = 0
        found = table.recover()
        self._tree = BlockTree(table, found, limits)
        for allocation, _ in found.allocations:
            allocation.deadline_s = deadline_s
            self._allocations[allocation.key] = self._in_state[allocation.state][allocation.key] = allocation
        rows = {allocation.row for allocation, _ in found.allocations}
        self._free_rows = [row for row in reversed(range(table.size)) if row not in rows]

    @property
    def num_blocks(self) -> int:
        return self._table.size

    @property
    def num_free_blocks(self) -> int:
        return len(self._tree.free)

    @property
    def num_spare_blocks(self) -> int:
        """The number of blocks that are freed when they are needed."""
        return self.num_blocks - len(self._tree.free) - self._tree.num_needed

    @property
    def num_kept_blocks(self) -> int:
        return self._tree.num_kept

    @property
    def num_promised_blocks(self) -> int:
        """The number of kept blocks that are promised to next turns."""
        return self._tree.num_promised

    @property
    def num_shared_blocks(self) -> int:
        """The number of blocks that several requests list."""
        return self._tree.num_shared

    @property
    def known(self) -> dict[PoolBlockId, bytes]:
        """The hashes of all known blocks. Collected anew each time."""
        return self._tree.known

    @property
    def knows_content(self) -> bool:
        return self._tree.knows_content

    @property
    def allocations(self) -> Collection[Allocation]:
        return self._allocations.values()

    def __len__(self) -> int:
        return len(self._allocations)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._allocations

    def tail_of(self, key: RequestKey) -> Run | None:
        """Returns the last run of the request's blocks. None: it has none."""
        allocation = self._allocations.get(key)
        return allocation.tail if allocation else None

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def reserve(
        self,
        key: RequestKey,
        num_tokens: int,
        deadline_s: float,
        hashes: Sequence[bytes] = (),
        is_optional: bool = False,
        owner: str = "",
    ) -> Grant | None:
        """Gives the request blocks for `num_tokens` tokens in total. Returns None if there is no room, and then changes
        nothing but to release what is of no use. Safe to repeat. `hashes` are those of its first blocks. If it has no
        KV yet, it gets the blocks that are known by them, but never the last token's. `is_optional`: other requests
        keep their spares, and next turns what they are promised. `owner` is the request's."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens} of request {key}: must be at least 1")
        allocation, num_found = self._allocations.get(key), 0
        if allocation and self._span.has_state and not allocation.num_tokens:
            # What it has is of no use any more. Others may use it, so it is not to be written again.
            self.release(key)
            allocation = None
        if allocation:
            tail, num_listed, num_cached = allocation.tail, allocation.num_blocks, allocation.num_tokens
        else:
            tail, num_found = self._known(hashes, num_tokens)
            num_listed, num_cached = num_found, num_found * self._block_size
        num_missing = self.blocks_for(num_tokens) - num_listed
        if not self._has_room(tail, num_listed, num_missing, needs_row=allocation is None):
            return None
        if is_optional and not self._has_unowned(tail, num_listed, num_missing, needs_row=allocation is None):
            return None
        if allocation is None:
            tail = self._tree.take(tail, num_found)
            dropped = self._make_room(num_missing, needs_row=True, drops_spares=not is_optional)
            allocation = self._begin(key, tail, num_found, hashes)
        else:
            if allocation.is_new:
                # A new router says what an earlier one has reserved it for, and its tokens may differ.
                allocation.hashes = hashes
            if num_tokens > num_cached:
                # An instance may begin to save as soon as this is granted.
                allocation.num_tokens = self._span.num_lasting(num_cached)
            self._enter(allocation, AllocationState.RESERVED)
            dropped = self._make_room(num_missing, needs_row=False, drops_spares=not is_optional)
        allocation.deadline_s = deadline_s
        self._tree.own(allocation.tail, owner)
        if num_missing > 0:
            self._grow(allocation, num_missing, owner)
        return Grant(allocation.blocks, dropped, num_cached, num_found * self._block_size)

    def find(
        self,
        key: RequestKey,
        num_tokens: int,
        deadline_s: float,
        hashes: Sequence[bytes] = (),
        owner: str = "",
    ) -> Grant:
        """Reserves only the blocks that the request has, or that are known by these hashes if it has none. Nothing is
        dropped for it. `num_tokens`, `hashes`, `owner`: see `reserve`."""
        allocation, num_found = self._allocations.get(key), 0
        if allocation:
            if allocation.is_new:
                allocation.hashes = hashes
            self._enter(allocation, AllocationState.RESERVED)
        else:
            tail, num_found = self._known(hashes, num_tokens)
            if not (num_found and self._free_rows):
                return Grant([], [])
            tail = self._tree.take(tail, num_found)
            allocation = self._begin(key, tail, num_found, hashes)
            self._table.point(allocation.row, num_found, tail.blocks[-1] if tail else None)
        allocation.deadline_s = deadline_s
        self._tree.own(allocation.tail, owner)
        return Grant(allocation.blocks, [], allocation.num_tokens, num_found * self._block_size)

    def _known(self, hashes: Sequence[bytes], num_tokens: int) -> tuple[Run | None, int]:
        """Returns what is known by these hashes, but never the last token's block."""
        return self._tree.find(hashes, at_most=(num_tokens - 1) // self._block_size)

    def commit(self, key: RequestKey, num_tokens: int, first_whole: int = 0) -> bool:
        """Makes this copy authoritative: its blocks have the KV of the first `num_tokens` tokens. Returns False and
        changes nothing if the request lacks the blocks because its reservation has lapsed. `first_whole`: its own
        columns before this one may lack blocks of sliding groups."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens} of request {key}: must be at least 1")
        allocation = self._allocations.get(key)
        if allocation is None or allocation.num_blocks < self.blocks_for(num_tokens):
            return False
        allocation.num_tokens, allocation.is_new = num_tokens, False
        self._enter(allocation, AllocationState.HELD)
        if allocation.num_published < first_whole:
            # Another request may need the blocks that this one has passed.
            allocation.hashes = ()
        if allocation.hashes:
            self._publish(allocation)
        return True

    def make_spare(self, key: RequestKey) -> None:
        """Keeps only committed blocks, as a spare. Safe to repeat, and for requests without blocks."""
        allocation = self._allocations.get(key)
        if allocation and allocation.state is not AllocationState.SPARE:
            self._fall_back(allocation)

    def renew(self, deadline_s: float) -> None:
        """Moves the deadline of all reservations, because a router is responsible for them."""
        for allocation in self._in_state[AllocationState.RESERVED].values():
            allocation.deadline_s = deadline_s

    def lapse(self, now: float) -> list[RequestKey]:
        """Makes overdue reservations fall back. Returns the requests that have nothing left. A prompt that has
        committed nothing keeps nothing: an instance may still be computing it, and has to be stopped."""
        late = [each for each in self._in_state[AllocationState.RESERVED].values() if each.deadline_s <= now]
        for allocation in late:
            if allocation.is_new:
                self.release(allocation.key)
            else:
                self._fall_back(allocation)
        return [allocation.key for allocation in late if allocation.key not in self._allocations]

    def release(self, key: RequestKey) -> None:
        """Takes all blocks from the request. Safe to repeat."""
        if allocation := self._allocations.get(key):
            self._now += 1
            self._remove(allocation, self._now)

    def forget_all(self) -> None:
        """Lets no further request have the blocks that are known now, nor what present requests commit from here on:
        the KV may be wrong."""
        self._tree.forget_all()
        for allocation in self._allocations.values():
            allocation.hashes = ()

    def promise(self, hashes: Sequence[bytes], owner: str, until: float) -> bool:
        """Lets the blocks known by these hashes go last until then, even after spares. Returns False and promises
        nothing if some are not known, or if the owner would have too many."""
        return self._tree.promise(hashes, owner, until)

    @property
    def may_promise(self) -> bool:
        return self._tree.promises.limits.of_one > 0

    def end_promises(self, now: float) -> None:
        """Lets what was promised until now go as everything else does."""
        self._tree.end_promises(now)

    # ---- checks ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises unless every block is listed, kept or free, the counts are right, and the table agrees."""
        self._tree.check(self.allocations)
        if self._table.num_requests != len(self._allocations):
            raise RuntimeError(
                f"the owner table has {self._table.num_requests} requests, and there are {len(self._allocations)}"
            )

    def check_idle(self) -> None:
        """Raises if a request has blocks."""
        self.check()
        if self._allocations:
            keys = sorted(self._allocations)[:5]
            raise RuntimeError(
                f"idle, but {len(self._allocations)} requests have blocks, and 0 should: {keys}"
            )

    def _publish(self, allocation: Allocation) -> None:
        """Makes the request's full blocks known, as far as their KV is committed."""
        first, hashes = allocation.num_published, allocation.hashes
        end = min(len(hashes), allocation.num_tokens // self._block_size)
        if first >= end or allocation.tail is None:
            return
        is_known = self._tree.publish(allocation.tail, first, hashes[first:end])
        allocation.num_published = end
        if not is_known or end == len(hashes):
            # Nothing can follow a block that is not known.
            allocation.hashes = ()

    # ---- room --------------------------------------------------------------------------------------------------------

    def _has_room(self, tail: Run | None, num_listed: int, num_missing: int, needs_row: bool) -> bool:
        """Returns whether enough blocks are free or spare, beside the first `num_listed` up to this run, which the
        request has or has found."""
        if needs_row and not (self._free_rows or self._in_state[AllocationState.SPARE]):
            return False
        if num_missing <= self.num_free_blocks:
            return True
        num_own = self._tree.num_spare_of(tail, num_listed)
        return num_missing <= self.num_free_blocks + self.num_spare_blocks - num_own

    def _has_unowned(self, tail: Run | None, num_listed: int, num_missing: int, needs_row: bool) -> bool:
        """Returns the same without the spares of other requests and without promised blocks."""
        if needs_row and not self._free_rows:
            return False
        num_kept = self.num_kept_blocks - self.num_promised_blocks - self._tree.num_kept_of(tail, num_listed)
        return num_missing <= self.num_free_blocks + num_kept

    def _make_room(self, num_missing: int, needs_row: bool, drops_spares: bool) -> list[RequestKey]:
        """Drops spare requests and kept blocks until enough blocks are free. Returns the dropped requests."""
        spares, num_passed, dropped = self._in_state[AllocationState.SPARE], 0, list[Allocation]()
        while (num_short := num_missing - self.num_free_blocks) > 0:
            spare = next(islice(spares.values(), num_passed, None), None)
            if self._tree.drop_kept(num_short, spare.since if spare and drops_spares else self._now):
                continue
            if drops_spares and spare is None and self._tree.break_promise():
                continue
            if spare is None or not drops_spares:
                raise RuntimeError(
                    f"{num_missing} blocks are needed, {self.num_free_blocks} are free and nothing may be dropped"
                )
            # Whatever needs its last blocks needs those before them.
            if spare.tail and not spare.tail.num_needed:
                dropped.append(spare)
                self._remove(spare, spare.since)
            else:
                num_passed += 1
        if needs_row and not self._free_rows:
            dropped.append(next(iter(spares.values())))
            self._remove(dropped[-1], dropped[-1].since)
        return [each.key for each in dropped]

    # ---- each of these leaves allocator and table in step ----

    def _begin(
        self, key: RequestKey, tail: Run | None, num_found: int, hashes: Sequence[bytes]
    ) -> Allocation:
        num_tokens, row = num_found * self._block_size, self._free_rows.pop()
        allocation = Allocation(key, num_tokens, AllocationState.RESERVED, row, tail)
        allocation.hashes, allocation.num_published, allocation.is_new = hashes, num_found, True
        self._table.begin(row, key, num_tokens, allocation.state, is_new=True)
        self._allocations[key] = self._in_state[allocation.state][key] = allocation
        return allocation

    def _enter(self, allocation: Allocation, state: AllocationState) -> None:
        was_spare = allocation.is_spare
        self._in_state[allocation.state].pop(allocation.key, None)
        allocation.state = state
        self._in_state[state][allocation.key] = allocation
        self._table.record(allocation.row, allocation.num_tokens, state, allocation.is_new)
        if was_spare != allocation.is_spare:
            self._tree.change(allocation.tail, allocation.is_spare)

    def _grow(self, allocation: Allocation, count: int, owner: str) -> None:
        tail, free = allocation.tail, self._tree.free
        added = free[-count:][::-1]
        del free[-count:]
        self._table.extend(allocation.row, allocation.num_blocks, tail.blocks[-1] if tail else None, added)
        allocation.tail = self._tree.extend(tail, added, owner)

    def _shrink(self, allocation: Allocation, num_kept: int, last_used: int) -> None:
        tail = self._tree.leave(allocation.tail, num_kept, allocation.is_spare, last_used)
        self._table.point(allocation.row, num_kept, tail.blocks[-1] if tail else None)
        allocation.tail = tail

    def _remove(self, allocation: Allocation, last_used: int) -> None:
        self._shrink(allocation, 0, last_used)
        self._free_rows.append(allocation.row)
        del self._allocations[allocation.key]
        del self._in_state[allocation.state][allocation.key]

    def _fall_back(self, allocation: Allocation) -> None:
        self._now += 1
        num_kept = self.blocks_for(allocation.num_tokens)
        if not num_kept:
            self._remove(allocation, self._now)
            return
        if num_kept < allocation.num_blocks:
            self._shrink(allocation, num_kept, self._now)
        # No instance fills its blocks any more.
        allocation.is_new = False
        self._enter(allocation, AllocationState.SPARE)
        allocation.since = self._now
