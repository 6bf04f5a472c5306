"""Assigns the pool's blocks to requests. It handles only ids, counts and hashes, and writes every change to the owner
table.

    nothing --reserve--> RESERVED --commit--> HELD --make_spare--> SPARE
                            ^                   |                    |  '-- dropped when room is needed
                            '------reserve------'------reserve-------'

A reservation that is not committed in time falls back to the last commit, as a spare. `release` ends any state.

A block with committed KV is known by the hash of all tokens up to its end. Any number of requests may then list it. It
becomes known only if the block before it in the request is known, so known blocks form trees, and a run of leading
hashes is a way from a root. A known block without requests is kept until its room is needed. When room is needed, spare
requests and kept blocks go in the order in which they were last used, and of the blocks last used together those at the
ends of prompts go first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from alignedserve.kvpool.owners import Allocation, AllocationState, OwnerTable
from alignedserve.types import PoolBlockId, RequestKey

# A block's count has the number of spare requests that list it in the low half, and that of others in the high half.
_SPARE = 1
_NEEDED = 1 << 32
# The largest number of runs of kept blocks at which void ones are not looked for.
_MAX_RUNS = 1024


@dataclass(order=True, slots=True)
class _Run:
    """Kept blocks of a request that were last used together, each the parent of the next one."""

    last_used: int
    # Minus the number of ancestors of the first block: the deepest run goes first among those last used together.
    order: int
    blocks: list[PoolBlockId] = field(compare=False)


@dataclass(frozen=True)
class Grant:
    # All blocks that the request now has.
    blocks: list[PoolBlockId]
    # Requests that lost their spares for it.
    dropped: list[RequestKey]
    # The number of the request's first tokens with KV in these blocks.
    num_tokens: int = 0
    # The number of tokens with KV that other requests had left.
    num_found: int = 0


class BlockAllocator:
    def __init__(self, table: OwnerTable, block_size: int, deadline_s: float) -> None:
        """Starts from the table's content. Reservations found there lapse at the deadline."""
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: must be at least 1")
        self._table = table
        self._block_size = block_size
        self._allocations: dict[RequestKey, Allocation] = {}
        # In each state, in the order in which they entered it.
        self._in_state: dict[AllocationState, dict[RequestKey, Allocation]] = {
            state: {} for state in AllocationState
        }
        # For each block, the requests that list it: see _NEEDED. `_num_needed` is the number of blocks that a request
        # lists which is no spare.
        self._counts = np.zeros(table.size, np.int64)
        self._num_needed = 0
        self._hash_of: dict[PoolBlockId, bytes] = {}
        self._known: dict[bytes, PoolBlockId] = {}
        # Counts events: a block or a spare is the older, the lower the number at which it was last used.
        self._now = 0
        # For each block that is listed, when a request that listed it as well was last used.
        self._last_used = np.zeros(table.size, np.int64)
        # Kept blocks, each with its run. `_runs` is a heap; blocks in a run that are no longer kept as part of it are
        # void.
        self._kept: dict[PoolBlockId, _Run] = {}
        self._runs: list[_Run] = []
        self._recover(deadline_s)

    def _recover(self, deadline_s: float) -> None:
        found = self._table.recover()
        rows = set()
        for allocation in found.allocations:
            allocation.deadline_s = deadline_s
            self._allocations[allocation.key] = self._in_state[allocation.state][allocation.key] = allocation
            self._count(allocation.numbers, _SPARE if allocation.is_spare else _NEEDED)
            rows.add(allocation.row)
        for block, block_hash, depth in found.known:
            self._hash_of[block], self._known[block_hash] = block_hash, block
            if not self._counts[block]:
                self._keep([block], 0, depth)
        is_used = self._counts.astype(bool)
        is_used[[*self._kept]] = True
        # Stacks: the last freed block is used next, while it is still cached.
        self._free = [PoolBlockId(block) for block in np.flatnonzero(~is_used)[::-1].tolist()]
        self._free_rows = [row for row in reversed(range(self._table.size)) if row not in rows]

    @property
    def num_blocks(self) -> int:
        return self._table.size

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_spare_blocks(self) -> int:
        """The number of blocks that are freed when they are needed."""
        return self.num_blocks - len(self._free) - self._num_needed

    @property
    def num_kept_blocks(self) -> int:
        return len(self._kept)

    @property
    def num_shared_blocks(self) -> int:
        """The number of blocks that several requests list. Counted anew each time."""
        return int(np.count_nonzero((self._counts & (_NEEDED - 1)) + (self._counts >> 32) > 1))

    @property
    def allocations(self) -> Iterable[Allocation]:
        return self._allocations.values()

    def __len__(self) -> int:
        return len(self._allocations)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._allocations

    def blocks_of(self, key: RequestKey) -> list[PoolBlockId]:
        allocation = self._allocations.get(key)
        return allocation.blocks if allocation else []

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def reserve(
        self, key: RequestKey, num_tokens: int, deadline_s: float, hashes: Sequence[bytes] = ()
    ) -> Grant | None:
        """Gives the request blocks for `num_tokens` tokens in total. Returns None and changes nothing if there is no
        room. Safe to repeat. `hashes` are those of its first blocks. If it has no blocks yet, it gets the blocks that
        are known by them, but never the last token's."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens} of request {key}: must be at least 1")
        allocation, found = self._allocations.get(key), list[PoolBlockId]()
        if allocation is None:
            found = self._find(hashes[: (num_tokens - 1) // self._block_size])
        num_missing = self.blocks_for(num_tokens) - len(allocation.blocks if allocation else found)
        numbers = allocation.numbers if allocation else np.array(found, np.int64)
        if not self._has_room(numbers, num_missing, needs_row=allocation is None):
            return None
        num_found = len(found) * self._block_size
        if allocation is None:
            if found:
                self._take_found(found, numbers)
            dropped = self._make_room(num_missing, needs_row=True)
            allocation = self._begin(key, found, numbers, hashes)
        else:
            self._enter(allocation, AllocationState.RESERVED)
            dropped = self._make_room(num_missing, needs_row=False)
        allocation.deadline_s = deadline_s
        if num_missing > 0:
            self._grow(allocation, num_missing)
        return Grant(list(allocation.blocks), dropped, allocation.num_tokens, num_found)

    def commit(self, key: RequestKey, num_tokens: int) -> bool:
        """Makes this copy authoritative: its blocks have the KV of the first `num_tokens` tokens. Returns False and
        changes nothing if the request lacks the blocks because its reservation has lapsed."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens} of request {key}: must be at least 1")
        allocation = self._allocations.get(key)
        if allocation is None or len(allocation.blocks) < self.blocks_for(num_tokens):
            return False
        allocation.num_tokens, allocation.is_new = num_tokens, False
        self._enter(allocation, AllocationState.HELD)
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

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Lets no further request have the blocks known by these hashes, nor those that continue them: their KV may be
        wrong."""
        if found := self._find(hashes):
            below = self._table.known_below(found[:1])
            self._table.forget(below)
            for block in below:
                del self._known[self._hash_of.pop(block)]
                if self._kept.pop(block, None):
                    self._free.append(block)

    # ---- checks ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises unless every block is listed, kept or free, the counts are right, and the table agrees."""
        listed = [block for allocation in self._allocations.values() for block in allocation.blocks]
        used = {*listed, *self._kept}
        if len({*listed}) + len(self._kept) + len(self._free) != self.num_blocks:
            raise RuntimeError(
                f"{len({*listed})} blocks used + {len(self._kept)} kept + {len(self._free)} free "
                f"!= {self.num_blocks} in all"
            )
        if len({*used, *self._free}) != self.num_blocks:
            raise RuntimeError(f"{len({*used, *self._free})} distinct blocks of {self.num_blocks}")
        self._check_owners()
        table = self._table
        if (table.num_requests, table.num_known) != (len(self._allocations), len(self._hash_of)):
            raise RuntimeError(
                f"the owner table has {table.num_requests} requests and {table.num_known} known blocks, "
                f"and there are {len(self._allocations)} and {len(self._hash_of)}"
            )
        if len(self._known) != len(self._hash_of) or not self._kept.keys() <= self._hash_of.keys():
            raise RuntimeError(
                f"{len(self._known)} hashes of {len(self._hash_of)} known blocks, {len(self._kept)} kept"
            )

    def _check_owners(self) -> None:
        counts = np.zeros(self.num_blocks, np.int64)
        for allocation in self._allocations.values():
            if allocation.numbers.tolist() != allocation.blocks:
                raise RuntimeError(
                    f"request {allocation.key} lists {len(allocation.blocks)} blocks, and others are counted"
                )
            counts[allocation.numbers] += _SPARE if allocation.is_spare else _NEEDED
        if (wrong := counts != self._counts).any():
            block = int(np.argmax(wrong))
            raise RuntimeError(
                f"block {block} counts {_both(self._counts[block])}, and {_both(counts[block])} list it"
            )
        if (num_needed := int(np.count_nonzero(counts >= _NEEDED))) != self._num_needed:
            raise RuntimeError(f"{self._num_needed} blocks are counted as needed, and {num_needed} are")

    def check_idle(self) -> None:
        """Raises if a request has blocks."""
        self.check()
        if self._allocations:
            keys = sorted(self._allocations)[:5]
            raise RuntimeError(
                f"idle, but {len(self._allocations)} requests have blocks, and 0 should: {keys}"
            )

    # ---- content -----------------------------------------------------------------------------------------------------

    def _find(self, hashes: Sequence[bytes]) -> list[PoolBlockId]:
        """Returns the blocks of the leading hashes that are known."""
        known = self._known
        # If a hash is known, those before it are.
        count = bisect_left(hashes, True, key=lambda each: each not in known)
        return [*map(known.__getitem__, hashes[:count])]

    def _publish(self, allocation: Allocation) -> None:
        """Makes the request's full blocks known, as far as their KV is committed."""
        first, hashes = allocation.num_published, allocation.hashes
        end = min(len(hashes), allocation.num_tokens // self._block_size)
        if first >= end:
            return
        is_known = hashes[first] in self._known
        if is_known or (first and allocation.blocks[first - 1] not in self._hash_of):
            # Nothing can follow a block that is not known.
            allocation.hashes = ()
            return
        blocks, fresh = allocation.blocks[first:end], hashes[first:end]
        self._table.publish(allocation.numbers[first:end], fresh)
        self._hash_of.update(zip(blocks, fresh, strict=True))
        self._known.update(zip(fresh, blocks, strict=True))
        allocation.num_published = end
        if end == len(hashes):
            allocation.hashes = ()

    def _keep(self, blocks: list[PoolBlockId], last_used: int, first: int) -> None:
        """Keeps a chain of known blocks, of which the first one has `first` ancestors."""
        run = _Run(last_used, -first, blocks)
        self._kept.update(dict.fromkeys(blocks, run))
        heappush(self._runs, run)
        if len(self._runs) > _MAX_RUNS + 2 * len(self._kept):
            self._runs = list({id(each): each for each in self._kept.values()}.values())
            heapify(self._runs)

    def _oldest_run(self) -> _Run | None:
        """Returns the run of which the last block goes first."""
        while self._runs:
            run = self._runs[0]
            while run.blocks and self._kept.get(run.blocks[-1]) is not run:
                run.blocks.pop()
            if run.blocks:
                return run
            heappop(self._runs)
        return None

    # ---- owners ------------------------------------------------------------------------------------------------------

    def _count(self, numbers: NDArray[np.int64], owner: int) -> NDArray[np.int64]:
        """Counts one more request that lists these blocks. Returns their counts before."""
        before = self._counts[numbers]
        self._counts[numbers] = before + owner
        if owner != _SPARE:
            self._num_needed += len(before) - int(np.count_nonzero(before >= _NEEDED))
        return before

    def _take_found(self, found: Sequence[PoolBlockId], numbers: NDArray[np.int64]) -> None:
        num_listed = int(np.count_nonzero(self._count(numbers, _NEEDED)))
        # A request that lists a block also lists those before it. So what is taken of a run are its first blocks.
        taken = Counter(id(run) for run in map(self._kept.__getitem__, found[num_listed:]))
        for block in found[num_listed:]:
            run = self._kept.pop(block)
            if count := taken.pop(id(run), 0):
                del run.blocks[:count]
            self._last_used[block] = 0

    def _disown(self, allocation: Allocation, first: int, last_used: int) -> None:
        """Takes the blocks from number `first` on from the request, which was last used at `last_used`."""
        blocks, numbers = allocation.blocks[first:], allocation.numbers[first:]
        left = self._counts[numbers]
        if allocation.is_spare:
            left -= _SPARE
        else:
            left -= _NEEDED
            self._num_needed -= len(left) - int(np.count_nonzero(left >= _NEEDED))
        self._counts[numbers] = left
        # A request that lists a block also lists those before it.
        num_listed = int(np.count_nonzero(left))
        if num_listed:
            listed = numbers[:num_listed]
            self._last_used[listed] = np.maximum(self._last_used[listed], last_used)
        end = len(blocks)
        while end > num_listed and blocks[end - 1] not in self._hash_of:
            end -= 1
        self._free += blocks[end:][::-1]
        if end > num_listed:
            self._keep_chain(blocks, numbers, num_listed, end, first, last_used)

    def _keep_chain(
        self,
        blocks: Sequence[PoolBlockId],
        numbers: NDArray[np.int64],
        begin: int,
        end: int,
        first: int,
        last_used: int,
    ) -> None:
        """Keeps these blocks, in runs that were last used together."""
        stamps = np.maximum(self._last_used[numbers[begin:end]], last_used)
        self._last_used[numbers[begin:end]] = 0
        cuts = [0, *(np.flatnonzero(np.diff(stamps)) + 1).tolist(), end - begin]
        for start, stop in pairwise(cuts):
            self._keep([*blocks[begin + start : begin + stop]], int(stamps[start]), first + begin + start)

    # ---- room --------------------------------------------------------------------------------------------------------

    def _has_room(self, numbers: NDArray[np.int64], num_missing: int, needs_row: bool) -> bool:
        """Returns whether enough blocks are free or spare, beside these, which the request has or has found."""
        if needs_row and not (self._free_rows or self._in_state[AllocationState.SPARE]):
            return False
        if num_missing <= len(self._free):
            return True
        num_own = int(np.count_nonzero(self._counts[numbers] < _NEEDED))
        return num_missing <= len(self._free) + self.num_spare_blocks - num_own

    def _make_room(self, num_missing: int, needs_row: bool) -> list[RequestKey]:
        """Drops spare requests and kept blocks until enough blocks are free. Returns the dropped requests."""
        spares, num_passed, dropped = self._in_state[AllocationState.SPARE], 0, list[Allocation]()
        while (num_short := num_missing - len(self._free)) > 0:
            run, spare = self._oldest_run(), next(islice(spares.values(), num_passed, None), None)
            if run and (spare is None or run.last_used <= spare.since):
                self._drop_kept(run, num_short)
                continue
            if spare is None:
                raise RuntimeError(
                    f"{num_missing} blocks are needed, {len(self._free)} are free and nothing is spare"
                )
            if (self._counts[spare.numbers] < _NEEDED).any():
                dropped.append(spare)
                self._remove(spare, spare.since)
            else:
                num_passed += 1
        if needs_row and not self._free_rows:
            dropped.append(next(iter(spares.values())))
            self._remove(dropped[-1], dropped[-1].since)
        return [each.key for each in dropped]

    def _drop_kept(self, run: _Run, at_most: int) -> None:
        """Frees blocks at the end of the run."""
        blocks = list[PoolBlockId]()
        while run.blocks and len(blocks) < at_most and self._kept.get(run.blocks[-1]) is run:
            blocks.append(run.blocks.pop())
        self._table.forget(blocks)
        for block in blocks:
            del self._kept[block]
            del self._known[self._hash_of.pop(block)]
        self._free += blocks

    # ---- each of these leaves allocator and table in step ----

    def _begin(
        self,
        key: RequestKey,
        found: list[PoolBlockId],
        numbers: NDArray[np.int64],
        hashes: Sequence[bytes],
    ) -> Allocation:
        num_tokens, row = len(found) * self._block_size, self._free_rows.pop()
        allocation = Allocation(key, found, num_tokens, AllocationState.RESERVED, row, numbers)
        allocation.hashes, allocation.num_published, allocation.is_new = hashes, len(found), True
        self._table.begin(row, key, num_tokens, allocation.state, is_new=True)
        self._allocations[key] = self._in_state[allocation.state][key] = allocation
        return allocation

    def _enter(self, allocation: Allocation, state: AllocationState) -> None:
        was_spare = allocation.is_spare
        self._in_state[allocation.state].pop(allocation.key, None)
        allocation.state = state
        self._in_state[state][allocation.key] = allocation
        self._table.record(allocation.row, allocation.num_tokens, state, allocation.is_new)
        if was_spare and not allocation.is_spare:
            self._count(allocation.numbers, _NEEDED - _SPARE)
        elif allocation.is_spare and not was_spare:
            left = self._counts[allocation.numbers] - (_NEEDED - _SPARE)
            self._counts[allocation.numbers] = left
            self._num_needed -= len(left) - int(np.count_nonzero(left >= _NEEDED))

    def _grow(self, allocation: Allocation, count: int) -> None:
        added = self._free[-count:][::-1]
        del self._free[-count:]
        numbers = np.array(added, np.int64)
        self._table.extend(allocation.row, allocation.blocks, numbers)
        allocation.blocks += added
        allocation.numbers = np.concatenate((allocation.numbers, numbers))
        self._counts[numbers] = _NEEDED
        self._num_needed += count

    def _shrink(self, allocation: Allocation, num_kept: int, last_used: int) -> None:
        self._table.shrink(allocation.row, allocation.blocks, num_kept)
        self._disown(allocation, num_kept, last_used)
        del allocation.blocks[num_kept:]
        allocation.numbers = allocation.numbers[:num_kept]

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
        if num_kept < len(allocation.blocks):
            self._shrink(allocation, num_kept, self._now)
        # No instance fills its blocks any more.
        allocation.is_new = False
        self._enter(allocation, AllocationState.SPARE)
        allocation.since = self._now


def _both(count: int) -> str:
    return f"{count >> 32} requests and {count & (_NEEDED - 1)} spares"
