"""Who holds which KV blocks of an instance. Ids and counts only; the bytes are `kv_cache`'s."""

from __future__ import annotations

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

    @property
    def num_free(self) -> int:
        return len(self._free)

    def held(self, owner: RequestId) -> list[BlockId]:
        return self._held.get(owner, [])

    def allocate(self, owner: RequestId, count: int) -> list[BlockId] | None:
        """`count` more blocks for `owner`, or None, and nothing changed, when there are fewer."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        blocks = self._free[-count:][::-1]
        del self._free[-count:]
        self._held.setdefault(owner, []).extend(blocks)
        return blocks

    def free(self, owner: RequestId) -> None:
        """Gives back all that `owner` holds; safe to repeat."""
        self._free.extend(reversed(self._held.pop(owner, [])))

    def check(self) -> None:
        """Every block is held once or free."""
        num_held = sum(map(len, self._held.values()))
        if num_held + len(self._free) != self.num_blocks:
            raise RuntimeError(
                f"blocks leaked: {num_held} held + {len(self._free)} free != {self.num_blocks} in all"
            )
        distinct = {block for blocks in (self._free, *self._held.values()) for block in blocks}
        if len(distinct) != self.num_blocks:
            raise RuntimeError(f"blocks held twice: {len(distinct)} distinct of {self.num_blocks}")

    def check_idle(self) -> None:
        self.check()
        if self._held:
            raise RuntimeError(f"idle, but {len(self._held)} requests hold blocks: {sorted(self._held)[:5]}")
