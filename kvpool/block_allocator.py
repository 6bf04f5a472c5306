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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from alignedserve.kvpool.owners import Allocation, AllocationState, OwnerTable
from alignedserve.types import PoolBlockId, RequestKey

# Entries of the heap of kept blocks beyond twice their number at which void ones are removed.
_MAX_VOID = 1024


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
        # For each block, the number of requests that list it, and of those among them that are no spares.
        self._num_owners = np.zeros(table.size, np.int64)
        self._num_pins = np.zeros(table.size, np.int64)
        self._num_pinned = self.num_shared_blocks = 0
        self._hash_of: dict[PoolBlockId, bytes] = {}
        self._known: dict[bytes, PoolBlockId] = {}
        # Counts events: a block or a spare is the older, the lower the number at which it was last used.
        self._now = 0
        self._last_used = np.zeros(table.size, np.int64)
        # Kept blocks, each with its entry in the heap. All others in the heap are void.
        self._kept: dict[PoolBlockId, tuple[int, int, PoolBlockId]] = {}
        self._heap: list[tuple[int, int, PoolBlockId]] = []
        self._recover(deadline_s)

    def _recover(self, deadline_s: float) -> None:
        found = self._table.recover()
        rows = set()
        for allocation in found.allocations:
            allocation.deadline_s = deadline_s
            self._allocations[allocation.key] = self._in_state[allocation.state][allocation.key] = allocation
            self._own(np.array(allocation.blocks), is_pinned=allocation.state is not AllocationState.SPARE)
            rows.add(allocation.row)
        for block, block_hash, depth in found.known:
            self._hash_of[block], self._known[block_hash] = block_hash, block
            if not self._num_owners[block]:
                self._keep(block, depth)
        is_used = self._num_owners.astype(bool)
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
        return self.num_blocks - len(self._free) - self._num_pinned

    @property
    def num_kept_blocks(self) -> int:
        return len(self._kept)

    @property
    def allocations(self) -> Iterable[Allocation]:
        return self._allocations.values()

    def __len__(self) -> int:
        return len(self._allocations)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._allocations

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
        if not self._has_room(allocation, found, num_missing):
            return None
        num_found = len(found) * self._block_size
        if allocation is None:
            for block in found:
                self._kept.pop(block, None)
            self._own(np.array(found, np.int64), is_pinned=True)
        else:
            self._enter(allocation, AllocationState.RESERVED)
        dropped = self._make_room(num_missing, needs_row=allocation is None)
        if allocation is None:
            allocation = self._begin(key, found, hashes)
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
        allocation.num_tokens = num_tokens
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
        """Makes overdue reservations fall back. Returns the requests that have nothing left."""
        late = [each for each in self._in_state[AllocationState.RESERVED].values() if each.deadline_s <= now]
        for allocation in late:
            self._fall_back(allocation)
        return [allocation.key for allocation in late if allocation.key not in self._allocations]

    def release(self, key: RequestKey) -> None:
        """Takes all blocks from the request. Safe to repeat."""
        if allocation := self._allocations.get(key):
            self._use(allocation)
            self._remove(allocation)

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
        self._check_owners(listed)
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

    def _check_owners(self, listed: Sequence[PoolBlockId]) -> None:
        num_owners = np.bincount(np.array(listed, np.int64), minlength=self.num_blocks)
        if (wrong := num_owners != self._num_owners).any():
            block = int(np.argmax(wrong))
            raise RuntimeError(
                f"block {block} counts {self._num_owners[block]} requests, and {num_owners[block]} list it"
            )
        pinned = [
            block
            for allocation in self._allocations.values()
            if allocation.state is not AllocationState.SPARE
            for block in allocation.blocks
        ]
        num_shared = int(np.count_nonzero(num_owners > 1))
        if (len({*pinned}), num_shared) != (self._num_pinned, self.num_shared_blocks):
            raise RuntimeError(
                f"{self._num_pinned} blocks are counted as needed and {self.num_shared_blocks} as shared, "
                f"and {len({*pinned})} and {num_shared} are"
            )

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
        return [known[each] for each in takewhile(known.__contains__, hashes)] if known else []

    def _publish(self, allocation: Allocation) -> None:
        """Makes the request's full blocks known, as far as their KV is committed."""
        first, hashes = allocation.num_published, allocation.hashes
        end = min(len(hashes), allocation.num_tokens // self._block_size)
        if first >= end:
            return
        blocks = allocation.blocks[first:end]
        fresh = list(takewhile(lambda each: each not in self._known, hashes[first:end]))
        if first and allocation.blocks[first - 1] not in self._hash_of:
            fresh = []
        if fresh:
            self._table.publish(blocks[: len(fresh)], fresh)
            self._hash_of.update(zip(blocks, fresh, strict=False))
            self._known.update(zip(fresh, blocks, strict=False))
        allocation.num_published = end
        if end == len(hashes) or first + len(fresh) < end:
            # Nothing can follow a block that is not known.
            allocation.hashes = ()

    def _keep(self, block: PoolBlockId, depth: int) -> None:
        entry = self._kept[block] = int(self._last_used[block]), -depth, block
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._kept) + _MAX_VOID:
            self._heap = list(self._kept.values())
            heapify(self._heap)

    def _oldest_kept(self) -> tuple[int, int, PoolBlockId] | None:
        while self._heap and self._kept.get(self._heap[0][-1]) != self._heap[0]:
            heappop(self._heap)
        return self._heap[0] if self._heap else None

    def _use(self, allocation: Allocation) -> None:
        self._now += 1
        self._last_used[allocation.blocks] = self._now

    # ---- owners ------------------------------------------------------------------------------------------------------

    def _own(self, blocks: NDArray[np.int64], is_pinned: bool) -> None:
        """Counts one more request that lists these blocks."""
        self._num_owners[blocks] += 1
        self.num_shared_blocks += int(np.count_nonzero(self._num_owners[blocks] == 2))
        if is_pinned:
            self._pin(blocks)

    def _pin(self, blocks: NDArray[np.int64]) -> None:
        self._num_pins[blocks] += 1
        self._num_pinned += int(np.count_nonzero(self._num_pins[blocks] == 1))

    def _unpin(self, blocks: NDArray[np.int64]) -> None:
        self._num_pins[blocks] -= 1
        self._num_pinned -= int(np.count_nonzero(self._num_pins[blocks] == 0))

    def _disown(self, blocks: Sequence[PoolBlockId], first: int, is_pinned: bool) -> None:
        """Counts one request less that lists these blocks, of which the first one has `first` ancestors."""
        numbers = np.array(blocks, np.int64)
        if is_pinned:
            self._unpin(numbers)
        self._num_owners[numbers] -= 1
        left = self._num_owners[numbers]
        self.num_shared_blocks -= int(np.count_nonzero(left == 1))
        # A request that lists a block also lists those before it.
        num_listed = int(np.count_nonzero(left))
        for index in range(len(blocks) - 1, num_listed - 1, -1):
            if (block := blocks[index]) in self._hash_of:
                self._keep(block, first + index)
            else:
                self._free.append(block)

    # ---- room --------------------------------------------------------------------------------------------------------

    def _has_room(
        self, allocation: Allocation | None, found: Sequence[PoolBlockId], num_missing: int
    ) -> bool:
        """Returns whether enough blocks are free or spare, beside those that the request has or has found."""
        if allocation is None and not (self._free_rows or self._in_state[AllocationState.SPARE]):
            return False
        if num_missing <= len(self._free):
            return True
        own = allocation.blocks if allocation else found
        num_own = int(np.count_nonzero(self._num_pins[np.array(own, np.int64)] == 0))
        return num_missing <= len(self._free) + self.num_spare_blocks - num_own

    def _make_room(self, num_missing: int, needs_row: bool) -> list[RequestKey]:
        """Drops spare requests and kept blocks until enough blocks are free. Returns the dropped requests."""
        dropped, spare = list[Allocation](), None
        if num_missing > len(self._free):
            spares = iter([*self._in_state[AllocationState.SPARE].values()])
            spare = next(spares, None)
        while num_missing > len(self._free):
            kept = self._oldest_kept()
            if kept and (spare is None or kept[0] <= spare.since):
                self._drop_kept(kept[-1])
                continue
            if spare is None:
                raise RuntimeError(
                    f"{num_missing} blocks are needed, {len(self._free)} are free and nothing is spare"
                )
            if not self._num_pins[spare.blocks].all():
                dropped.append(spare)
                self._remove(spare)
            spare = next(spares, None)
        if needs_row and not self._free_rows:
            dropped.append(next(iter(self._in_state[AllocationState.SPARE].values())))
            self._remove(dropped[-1])
        return [each.key for each in dropped]

    def _drop_kept(self, block: PoolBlockId) -> None:
        del self._kept[block]
        self._table.forget([block])
        del self._known[self._hash_of.pop(block)]
        self._free.append(block)

    # ---- each of these leaves allocator and table in step ----

    def _begin(self, key: RequestKey, found: list[PoolBlockId], hashes: Sequence[bytes]) -> Allocation:
        num_tokens, row = len(found) * self._block_size, self._free_rows.pop()
        allocation = Allocation(key, found, num_tokens, AllocationState.RESERVED, row)
        allocation.hashes, allocation.num_published = hashes, len(found)
        self._table.begin(row, key, num_tokens, allocation.state)
        self._allocations[key] = self._in_state[allocation.state][key] = allocation
        return allocation

    def _enter(self, allocation: Allocation, state: AllocationState) -> None:
        was_spare, is_spare = (each is AllocationState.SPARE for each in (allocation.state, state))
        if was_spare != is_spare:
            (self._unpin if is_spare else self._pin)(np.array(allocation.blocks, np.int64))
        self._in_state[allocation.state].pop(allocation.key, None)
        allocation.state = state
        self._in_state[state][allocation.key] = allocation
        self._table.record(allocation.row, allocation.num_tokens, state)

    def _grow(self, allocation: Allocation, count: int) -> None:
        added = self._free[-count:][::-1]
        del self._free[-count:]
        self._table.extend(allocation.row, allocation.blocks, added)
        allocation.blocks.extend(added)
        self._own(np.array(added, np.int64), is_pinned=True)

    def _shrink(self, allocation: Allocation, num_kept: int) -> None:
        self._table.shrink(allocation.row, allocation.blocks, num_kept)
        is_pinned = allocation.state is not AllocationState.SPARE
        self._disown(allocation.blocks[num_kept:], num_kept, is_pinned)
        del allocation.blocks[num_kept:]

    def _remove(self, allocation: Allocation) -> None:
        self._shrink(allocation, 0)
        self._free_rows.append(allocation.row)
        del self._allocations[allocation.key]
        del self._in_state[allocation.state][allocation.key]

    def _fall_back(self, allocation: Allocation) -> None:
        num_kept = self.blocks_for(allocation.num_tokens)
        if not num_kept:
            self._remove(allocation)
            return
        self._use(allocation)
        if num_kept < len(allocation.blocks):
            self._shrink(allocation, num_kept)
        self._enter(allocation, AllocationState.SPARE)
        allocation.since = self._now
