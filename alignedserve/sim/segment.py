"""What the blocks of the pool's segment hold, as far as it can be wrong: whose KV, from which place on, how much of it.

Real copies move bytes that nobody looks at. Here a read of anything but what was to be there is an error, at its start
and at its end, and so is a write into a block that another copy is writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.kvpool.owners import OwnerTable
from alignedserve.types import PoolBlockId, RequestKey


@dataclass(frozen=True, slots=True)
class Content:
    key: RequestKey
    # of the block within the request
    index: int
    num_tokens: int


class Write:
    """A copy into blocks under way. Until it is done they hold what they held if that was the same, else nothing."""

    def __init__(
        self, segment: SimSegment, key: RequestKey, places: Sequence[tuple[int, PoolBlockId]]
    ) -> None:
        self._segment = segment
        self.key = key
        self._places = places
        for index, block in places:
            other = segment.writes.get(block)
            if other:
                raise RuntimeError(f"block {block}: request {key} writes while request {other.key} does")
            segment.writes[block] = self
            held = segment.contents.get(block)
            if held and (held.key, held.index) != (key, index):
                del segment.contents[block]

    @property
    def num_blocks(self) -> int:
        return len(self._places)

    def finish(self, num_tokens: int) -> None:
        """The request's first `num_tokens` are there now."""
        size = self._segment.block_size
        for index, block in self._places:
            self._segment.contents[block] = Content(self.key, index, min(size, num_tokens - index * size))
        self.abandon()

    def abandon(self) -> None:
        for _, block in self._places:
            del self._segment.writes[block]


class SimSegment:
    def __init__(self, name: str, num_blocks: int, block_size: int) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.block_size = block_size
        # the table in the real segment: what a pool that starts again finds
        self.owners = OwnerTable.plain(num_blocks)
        self.contents: dict[PoolBlockId, Content] = {}
        self.writes: dict[PoolBlockId, Write] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def write(self, key: RequestKey, blocks: Sequence[PoolBlockId], first: int, end: int) -> Write:
        """Of the tokens from `first` up to `end`."""
        needed = self.num_blocks_for(end)
        if needed > len(blocks):
            raise RuntimeError(f"request {key}: {end} tokens need {needed} blocks, it has {len(blocks)}")
        return Write(self, key, [(index, blocks[index]) for index in range(first // self.block_size, needed)])

    def check_read(self, key: RequestKey, blocks: Sequence[PoolBlockId], num_tokens: int) -> None:
        for index in range(self.num_blocks_for(num_tokens)):
            held = self.contents.get(blocks[index])
            least = min(self.block_size, num_tokens - index * self.block_size)
            if held is None or (held.key, held.index) != (key, index) or held.num_tokens < least:
                raise RuntimeError(
                    f"request {key} reads {least} tokens of its block {index} in {blocks[index]}, which holds {held}"
                )
