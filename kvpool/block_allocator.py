"""Assigns the pool's blocks to requests. It handles only ids and counts, and writes every change to the owner table.

    nothing --reserve--> RESERVED --commit--> HELD --make_spare--> SPARE
                            ^                   |                    |  '-- dropped when room is needed
                            '------reserve------'------reserve-------'

A reservation that is not committed in time falls back to the last commit, as a spare. `release` ends any state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.kvpool.owners import Allocation, AllocationState, OwnerTable
from alignedserve.types import PoolBlockId, RequestKey


@dataclass(frozen=True)
class Grant:
    # All blocks that the request now has.
    blocks: list[PoolBlockId]
    # Requests that lost their spares for it.
    dropped: list[RequestKey]


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
        for allocation in table.recover():
            allocation.deadline_s = deadline_s
            self._allocations[allocation.key] = self._in_state[allocation.state][allocation.key] = allocation
        owned = {block for allocation in self._allocations.values() for block in allocation.blocks}
        # A stack: the last freed block is used next, while it is still cached.
        self._free = [PoolBlockId(block) for block in reversed(range(table.size)) if block not in owned]

    @property
    def num_blocks(self) -> int:
        return self._table.size

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_spare_blocks(self) -> int:
        return sum(len(allocation.blocks) for allocation in self._in_state[AllocationState.SPARE].values())

    @property
    def allocations(self) -> Iterable[Allocation]:
        return self._allocations.values()

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._allocations

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def reserve(self, key: RequestKey, num_tokens: int, deadline_s: float) -> Grant | None:
        """Gives the request blocks for `num_tokens` tokens in total. Returns None and changes nothing if there is no
        room. Safe to repeat."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens} of request {key}: must be at least 1")
        allocation = self._allocations.get(key)
        num_missing = self.blocks_for(num_tokens) - len(allocation.blocks if allocation else ())
        victims = self._victims(num_missing, key)
        if victims is None:
            return None
        for victim in victims:
            self._remove(victim)
        if allocation is None:
            allocation = self._allocations[key] = Allocation(key, [], 0, AllocationState.RESERVED)
        self._enter(allocation, AllocationState.RESERVED)
        allocation.deadline_s = deadline_s
        if num_missing > 0:
            self._grow(allocation, num_missing)
        return Grant(list(allocation.blocks), [victim.key for victim in victims])

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
        """Frees all blocks of the request. Safe to repeat."""
        if allocation := self._allocations.get(key):
            self._remove(allocation)

    def check(self) -> None:
        """Raises unless every block is held once or free, and the table agrees."""
        held = [block for allocation in self._allocations.values() for block in allocation.blocks]
        if len(held) + len(self._free) != self.num_blocks:
            raise RuntimeError(
                f"{len(held)} blocks used + {len(self._free)} free != {self.num_blocks} in all"
            )
        if len({*held, *self._free}) != self.num_blocks:
            raise RuntimeError(f"{len({*held, *self._free})} distinct blocks of {self.num_blocks}")
        if self._table.num_owned != len(held):
            raise RuntimeError(
                f"the owner table has {self._table.num_owned} owned blocks, {len(held)} are used"
            )

    def check_idle(self) -> None:
        """Raises if a request has blocks."""
        self.check()
        if self._allocations:
            keys = sorted(self._allocations)[:5]
            raise RuntimeError(
                f"idle, but {len(self._allocations)} requests have blocks, and 0 should: {keys}"
            )

    # ---- each of these leaves allocator and table in step ----

    def _victims(self, num_missing: int, key: RequestKey) -> list[Allocation] | None:
        """Returns the oldest spares of other requests that make enough room; None if all of them do not suffice."""
        victims: list[Allocation] = []
        num_found = len(self._free)
        for allocation in self._in_state[AllocationState.SPARE].values():
            if num_found >= num_missing:
                break
            if allocation.key != key:
                victims.append(allocation)
                num_found += len(allocation.blocks)
        return victims if num_found >= num_missing else None

    def _enter(self, allocation: Allocation, state: AllocationState) -> None:
        self._in_state[allocation.state].pop(allocation.key, None)
        allocation.state = state
        self._in_state[state][allocation.key] = allocation
        if allocation.blocks:
            self._table.record(allocation.blocks[0], allocation.num_tokens, state)

    def _grow(self, allocation: Allocation, count: int) -> None:
        added = self._free[-count:][::-1]
        del self._free[-count:]
        self._table.extend(allocation.key, allocation.blocks, added)
        allocation.blocks.extend(added)

    def _shrink(self, allocation: Allocation, num_kept: int) -> None:
        self._table.shrink(allocation.blocks, num_kept)
        self._free.extend(reversed(allocation.blocks[num_kept:]))
        del allocation.blocks[num_kept:]

    def _remove(self, allocation: Allocation) -> None:
        self._shrink(allocation, 0)
        del self._allocations[allocation.key]
        del self._in_state[allocation.state][allocation.key]

    def _fall_back(self, allocation: Allocation) -> None:
        num_kept = self.blocks_for(allocation.num_tokens)
        if not num_kept:
            self._remove(allocation)
            return
        if num_kept < len(allocation.blocks):
            self._shrink(allocation, num_kept)
        self._enter(allocation, AllocationState.SPARE)
