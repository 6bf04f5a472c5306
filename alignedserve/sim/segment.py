"""What the blocks of the pool's segment hold, as far as it can be wrong: whose KV, from which place on, how much of it.

Real copies move bytes that nobody looks at. Here a read of anything but what was to be there is an error, at its start
and at its end, and so is a write into a block that another copy is writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from alignedserve.kvpool.owners import OwnerTable
from alignedserve.types import PoolBlockId, RequestKey


class Content(NamedTuple):
    """Of a block."""

    key: RequestKey
    # The block's index within the request.
    place: int
    num_tokens: int
    # The hash of the tokens whose KV it is, with all before them: see kv_model.py.
    digest: int = 0
    # Whether it is inputs of layers in place of KV, which never leave their instance.
    is_inputs: bool = False


class Write:
    """A copy into blocks under way. Until it is done they hold what they held if that was the same, else nothing."""

    def __init__(self, segment: SimSegment, places: Sequence[tuple[PoolBlockId, Content]]) -> None:
        self._segment = segment
        self._places = places
        for block, content in places:
            other = segment.writes.get(block)
            if other:
                raise RuntimeError(
                    f"block {block}: request {content.key} writes while {other._places} are written"
                )
            segment.writes[block] = self
            held = segment.contents.get(block)
            if held and (held.key, held.place) != (content.key, content.place):
                del segment.contents[block]

    def finish(self) -> None:
        for block, content in self._places:
            self._segment.contents[block] = content
        self.abandon()

    def abandon(self) -> None:
        for block, _ in self._places:
            del self._segment.writes[block]


class SimSegment:
    def __init__(self, name: str, num_blocks: int, block_size: int) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.block_size = block_size
        # The table that lies in the real segment, where a pool that starts again finds it.
        self.owners = OwnerTable.plain(num_blocks)
        self.contents: dict[PoolBlockId, Content] = {}
        self.writes: dict[PoolBlockId, Write] = {}

    def write(self, places: Sequence[tuple[PoolBlockId, Content]]) -> Write:
        return Write(self, places)

    def read(self, key: RequestKey, blocks: Sequence[PoolBlockId]) -> list[Content]:
        """Of consecutive blocks of a request. All but the last are full. Which of them are wanted, and how much of the
        last, its reader knows."""
        found: list[Content] = []
        first = self.contents.get(blocks[0]) if blocks else None
        for index, block in enumerate(blocks, first.place if first else 0):
            held = self.contents.get(block)
            is_full = held is not None and held.num_tokens == self.block_size
            if held is None or (held.key, held.place) != (key, index) or not (is_full or block == blocks[-1]):
                raise RuntimeError(f"request {key} reads its block {index} in {block}, which holds {held}")
            found.append(held)
        return found
