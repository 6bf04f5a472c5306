"""The contents of a simulated instance's blocks, in the detail in which they can be wrong: KV of one request from the
first slot up, and of another from the last slot down. If one overwrites the other's KV, that KV is gone."""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.kv.layout import Layout
from alignedserve.sim.segment import Content
from alignedserve.types import BlockId, RequestKey

# Returns the hash of a request's first tokens, given their number.
Digest = Callable[[int], int]


class BlockContents:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # A block without an entry has no KV at that end.
        self._left: dict[BlockId, Content] = {}
        self._right: dict[BlockId, Content] = {}
        # The requests that fill blocks from the right.
        self._from_right: set[RequestKey] = set()
        # By request and block index: the first token that host memory has, and the content up to the last one.
        self._away: dict[RequestKey, dict[int, tuple[int, Content]]] = {}

    def __setitem__(self, block: BlockId, content: Content) -> None:
        """Overwrites the whole block."""
        self.clear(block)
        self._own(content.key)[block] = content

    def lay_out(self, key: RequestKey, layout: Layout) -> None:
        """Records from which end the request fills its blocks."""
        (self._from_right.add if layout.is_reversed else self._from_right.discard)(key)

    def forget(self, key: RequestKey) -> None:
        """Forgets a request that has no blocks any more."""
        self._from_right.discard(key)
        self.drop(key)

    def clear(self, block: BlockId) -> None:
        self._left.pop(block, None)
        self._right.pop(block, None)

    def get(self, key: RequestKey, block: BlockId) -> Content | None:
        """Returns the content at the end from which the request fills its blocks."""
        return self._own(key).get(block)

    def write(self, block: BlockId, content: Content) -> None:
        """Writes the request's tokens of this block. Anything else in their slots is gone."""
        own = self._own(content.key)
        own[block] = content
        other = self._left if own is self._right else self._right
        if (held := other.get(block)) and held.num_tokens + content.num_tokens > self._block_size:
            num_left = self._block_size - content.num_tokens
            # The hash of the rest is unknown. It must not be needed until the rest is whole again.
            other[block] = held._replace(num_tokens=num_left, digest=0)

    # ---- host memory -------------------------------------------------------------------------------------------------

    def save(self, key: RequestKey, block: BlockId, index: int, first: int, end: int, digest: Digest) -> None:
        held = self._right.get(block)
        if held is None or (held.key, held.place) != (key, index) or held.num_tokens < end:
            raise RuntimeError(f"request {key}: tokens to {end} of its block {index} are saved from {held}")
        there = self._away.setdefault(key, {}).get(index)
        if there and there[0] != end:
            raise RuntimeError(
                f"request {key}: tokens {first} to {end} of block {index} are saved beside {there}"
            )
        self._away[key][index] = (first, there[1] if there else held._replace(num_tokens=end))
        self._right[block] = held._replace(
            num_tokens=first, digest=digest(index * self._block_size + first) if first else 0
        )

    def restore(self, key: RequestKey, block: BlockId, index: int, first: int, end: int) -> None:
        (first_there, whole), held = self._away[key].pop(index), self._right.get(block)
        num_held = held.num_tokens if held and (held.key, held.place) == (key, index) else 0
        if (first_there, whole.num_tokens) != (first, end) or num_held != first:
            raise RuntimeError(
                f"request {key}: tokens {first} to {end} of block {index} come back to {held}; "
                f"{first_there} to {whole.num_tokens} were saved"
            )
        self._right[block] = whole

    def drop(self, key: RequestKey) -> None:
        """Drops what host memory has of the request."""
        self._away.pop(key, None)

    def copy(self, key: RequestKey, old: BlockId, new: BlockId) -> None:
        """Moves the request's KV from the old block to the new one."""
        self.clear(new)
        if held := self._right.pop(old, None):
            if held.key != key:
                raise RuntimeError(f"request {key}: its block {old} holds {held}")
            self._right[new] = held

    def _own(self, key: RequestKey) -> dict[BlockId, Content]:
        return self._right if key in self._from_right else self._left
