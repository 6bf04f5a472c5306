"""Who holds which KV blocks of an instance. Ids and counts only; the bytes are `kv_cache`'s.

A full block may be given the hash of all tokens up to its end (`scheduling/block_hashes.py`), and then several owners
can hold it. When the last of them has gone it is kept: free like others, but taken last, and whoever asks for its hash
before that holds it again.

What is free is counted as if nothing were shared: a block counts once for each of its owners. So those who plan by
counts need not know what is shared, and what they are promised is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from alignedserve.types import BlockId, RequestId


class BlockManager:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        """Every block is free, whoever held it."""
        # a stack: the block freed last is used next, while it is still in a cache
        self._free = [BlockId(block) for block in reversed(range(self.num_blocks))]
        self._held: dict[RequestId, list[BlockId]] = {}
        self._named: dict[bytes, BlockId] = {}
        self._names: dict[BlockId, bytes] = {}
        # nobody holds these, and they have names; the one left first is taken first
        self._kept: dict[BlockId, None] = {}
        # owners beyond the first
        self._others: Counter[BlockId] = Counter()
        self._num_others = 0

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._kept) - self._num_others

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def held(self, owner: RequestId) -> list[BlockId]:
        return self._held.get(owner, [])

    def allocate(self, owner: RequestId, count: int) -> list[BlockId] | None:
        """`count` more blocks for `owner`, or None, and nothing changed, when there are fewer."""
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
        """Gives back all that `owner` holds; safe to repeat."""
        blocks = self._held.pop(owner, [])
        if self._names or self._others:
            self._leave(blocks)
        else:
            self._free.extend(reversed(blocks))

    # ---- blocks with names ------------------------------------------------------------------------------------------

    def share(self, owner: RequestId, names: Sequence[bytes]) -> int:
        """`owner`, who has none yet, holds the blocks of the first of these names, as far as they are known. How many?

        They count like others: what is allocated to the owner besides has to fit, too.
        """
        if owner in self._held:
            raise RuntimeError(f"{owner}: holds {len(self._held[owner])} blocks before it shares any")
        blocks: list[BlockId] = []
        for name in names[: self.num_free]:
            if name not in self._named:
                break
            blocks.append(self._named[name])
        for block in blocks:
            if block in self._kept:
                del self._kept[block]
            else:
                self._others[block] += 1
                self._num_others += 1
        if blocks:
            self._held[owner] = blocks
        return len(blocks)

    def num_known(self, names: Sequence[bytes]) -> int:
        """Of how many of the first of these names there are blocks."""
        return next((count for count, name in enumerate(names) if name not in self._named), len(names))

    def name(self, owner: RequestId, first: int, names: Sequence[bytes]) -> None:
        """Those of the owner's blocks from its `first` on: their KV is there. What another block is called already
        goes without."""
        for block, name in zip(islice(self.held(owner), first, None), names, strict=False):
            if name not in self._named:
                self._named[name], self._names[block] = block, name

    def forget(self, names: Iterable[bytes]) -> None:
        """Nobody else is to hold the blocks of these names from here on."""
        for name in names:
            if name in self._named:
                block = self._named[name]
                self._forget(block)
                if block in self._kept:
                    del self._kept[block]
                    self._free.append(block)

    def _leave(self, blocks: Sequence[BlockId]) -> None:
        # a prompt's end first, so that it is taken first: it is of no use without the beginning
        for block in reversed(blocks):
            if block in self._others:
                self._others[block] -= 1
                self._num_others -= 1
                if not self._others[block]:
                    del self._others[block]
            elif block in self._names:
                self._kept[block] = None
            else:
                self._free.append(block)

    def _take_kept(self, count: int) -> None:
        for block in list(islice(self._kept, count)):
            del self._kept[block]
            self._forget(block)
            self._free.append(block)

    def _forget(self, block: BlockId) -> None:
        if block in self._names:
            del self._named[self._names.pop(block)]

    # ---- checks -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every block is held, kept or free; and the counts are right."""
        held = [block for blocks in self._held.values() for block in blocks]
        if len(held) + self.num_free != self.num_blocks:
            raise RuntimeError(
                f"blocks leaked: {len(held)} held + {self.num_free} free != {self.num_blocks} in all"
            )
        idle = [*self._free, *self._kept]
        num_distinct = len({*idle, *held})
        if num_distinct != self.num_blocks or len({*held}) + len(idle) != self.num_blocks:
            raise RuntimeError(f"blocks held twice: {num_distinct} distinct of {self.num_blocks}")

    def check_idle(self) -> None:
        self.check()
        if self._held:
            raise RuntimeError(f"idle, but {len(self._held)} requests hold blocks: {sorted(self._held)[:5]}")
