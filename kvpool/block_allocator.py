"""Who has which block of the pool. Ids and counts only; every change goes to the owner table as it is made.

    nothing --reserve--> RESERVED --commit--> HELD --make_spare--> SPARE
                            ^                   |                    |  '-- dropped when room is needed
                            '------reserve------'------reserve-------'
A reservation that is not committed in time falls back to what was committed before, as a spare. `release` ends all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.kvpool.owners import Holding, OwnerTable, State
from alignedserve.types import PoolBlockId, RequestKey


@dataclass(frozen=True)
class Grant:
    # all blocks of the request
    blocks: list[PoolBlockId]
    # spares that had to go for it
    dropped: list[RequestKey]


class BlockAllocator:
    def __init__(self, table: OwnerTable, block_size: int, deadline_s: float) -> None:
        """With what the table says; reservations found there lapse at the deadline."""
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: must be at least 1")
        self._table = table
        self._block_size = block_size
        self._holdings: dict[RequestKey, Holding] = {}
        # each in the order in which they came into that state
        self._in_state: dict[State, dict[RequestKey, Holding]] = {state: {} for state in State}
        for holding in table.recover():
            holding.deadline_s = deadline_s
            self._holdings[holding.key] = self._in_state[holding.state][holding.key] = holding
        owned = {block for holding in self._holdings.values() for block in holding.blocks}
        # a stack: the block freed last is used next, while it is still in a cache
        self._free = [PoolBlockId(block) for block in reversed(range(table.size)) if block not in owned]

    @property
    def num_blocks(self) -> int:
        return self._table.size

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_spare_blocks(self) -> int:
        return sum(len(holding.blocks) for holding in self._in_state[State.SPARE].values())

    @property
    def holdings(self) -> Iterable[Holding]:
        return self._holdings.values()

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._holdings

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def reserve(self, key: RequestKey, num_tokens: int, deadline_s: float) -> Grant | None:
        """Blocks for so many tokens, those it has included; None, and nothing changed: no room. Safe to repeat."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens} of request {key}: must be at least 1")
        holding = self._holdings.get(key)
        num_missing = self.blocks_for(num_tokens) - len(holding.blocks if holding else ())
        victims = self._victims(num_missing, key)
        if victims is None:
            return None
        for victim in victims:
            self._remove(victim)
        if holding is None:
            holding = self._holdings[key] = Holding(key, [], 0, State.RESERVED)
        self._enter(holding, State.RESERVED)
        holding.deadline_s = deadline_s
        if num_missing > 0:
            self._grow(holding, num_missing)
        return Grant(list(holding.blocks), [victim.key for victim in victims])

    def commit(self, key: RequestKey, num_tokens: int) -> bool:
        """The first `num_tokens` are there, and this is the copy that counts. False, and nothing changed: it does
        not have the blocks for them; its reservation has lapsed."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens} of request {key}: must be at least 1")
        holding = self._holdings.get(key)
        if holding is None or len(holding.blocks) < self.blocks_for(num_tokens):
            return False
        holding.num_tokens = num_tokens
        self._enter(holding, State.HELD)
        return True

    def make_spare(self, key: RequestKey) -> None:
        """Only what is committed is kept. Safe to repeat, and for requests that have nothing."""
        holding = self._holdings.get(key)
        if holding and holding.state is not State.SPARE:
            self._fall_back(holding)

    def renew(self, deadline_s: float) -> None:
        """All reservations: somebody still answers for them."""
        for holding in self._in_state[State.RESERVED].values():
            holding.deadline_s = deadline_s

    def lapse(self, now: float) -> list[RequestKey]:
        """Reservations that are too late fall back; of those returned nothing is left."""
        late = [each for each in self._in_state[State.RESERVED].values() if each.deadline_s <= now]
        for holding in late:
            self._fall_back(holding)
        return [holding.key for holding in late if holding.key not in self._holdings]

    def release(self, key: RequestKey) -> None:
        """Safe to repeat."""
        if holding := self._holdings.get(key):
            self._remove(holding)

    def check(self) -> None:
        """Every block is held once or free, and the table says the same."""
        held = [block for holding in self._holdings.values() for block in holding.blocks]
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
        self.check()
        if self._holdings:
            keys = sorted(self._holdings)[:5]
            raise RuntimeError(f"idle, but {len(self._holdings)} requests have blocks, and 0 should: {keys}")

    # ---- each of these leaves allocator and table in step ----

    def _victims(self, num_missing: int, key: RequestKey) -> list[Holding] | None:
        """The oldest spares, not its own, that make room for so many blocks; None if all of them do not."""
        victims: list[Holding] = []
        num_found = len(self._free)
        for holding in self._in_state[State.SPARE].values():
            if num_found >= num_missing:
                break
            if holding.key != key:
                victims.append(holding)
                num_found += len(holding.blocks)
        return victims if num_found >= num_missing else None

    def _enter(self, holding: Holding, state: State) -> None:
        self._in_state[holding.state].pop(holding.key, None)
        holding.state = state
        self._in_state[state][holding.key] = holding
        if holding.blocks:
            self._table.record(holding.blocks[0], holding.num_tokens, state)

    def _grow(self, holding: Holding, count: int) -> None:
        added = self._free[-count:][::-1]
        del self._free[-count:]
        self._table.extend(holding.key, holding.blocks, added)
        holding.blocks.extend(added)

    def _shrink(self, holding: Holding, num_kept: int) -> None:
        self._table.shrink(holding.blocks, num_kept)
        self._free.extend(reversed(holding.blocks[num_kept:]))
        del holding.blocks[num_kept:]

    def _remove(self, holding: Holding) -> None:
        self._shrink(holding, 0)
        del self._holdings[holding.key]
        del self._in_state[holding.state][holding.key]

    def _fall_back(self, holding: Holding) -> None:
        num_kept = self.blocks_for(holding.num_tokens)
        if not num_kept:
            self._remove(holding)
            return
        if num_kept < len(holding.blocks):
            self._shrink(holding, num_kept)
        self._enter(holding, State.SPARE)
