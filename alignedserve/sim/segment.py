"""What the blocks of the pool's segment hold, as far as it can be wrong: whose KV, from which place on, how much of it.
Each holds that of one group of layers: block `num_groups` * p + g, the g-th one's of the column that the pool keeps in
its block p.

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
    # The index of its column within the request.
    place: int
    num_tokens: int
    # The hash of the tokens whose KV it is, with all before them: see kv_model.py.
    digest: int = 0
    # Whether it is inputs of layers in place of KV, which never leave their instance.
    is_inputs: bool = False
    # The group of layers whose KV it is.
    group: int = 0

    @property
    def identity(self) -> tuple[RequestKey, int, int]:
        return self.key, self.group, self.place


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
            if held and held.identity != content.identity:
                del segment.contents[block]

    def finish(self) -> None:
        for block, content in self._places:
            self._segment.contents[block] = content
        self.abandon()

    def abandon(self) -> None:
        for block, _ in self._places:
            del self._segment.writes[block]


class SimSegment:
    def __init__(self, name: str, num_blocks: int, block_size: int, num_groups: int = 1) -> None:
        """`num_blocks`: as the pool counts them, whole columns."""
        self.name = name
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_groups = num_groups
        # The table that lies in the real segment, where a pool that starts again finds it.
        self.owners = OwnerTable.plain(num_blocks)
        self.contents: dict[PoolBlockId, Content] = {}
        self.writes: dict[PoolBlockId, Write] = {}

    def write(self, places: Sequence[tuple[PoolBlockId, Content]]) -> Write:
        for block, content in places:
            if block % self.num_groups != content.group:
                raise RuntimeError(f"block {block} of {self.num_groups} groups is to hold {content}")
        return Write(self, places)

    def read(self, key: RequestKey, blocks: Sequence[PoolBlockId]) -> list[Content]:
        """Of a request's consecutive columns, in each group to the same last one. All before that are full. Which of
        them are wanted, and how much of the last, its reader knows."""
        contents = [self.contents.get(block) for block in blocks]
        last = contents[-1].place if contents and contents[-1] else 0
        for group in range(self.num_groups):
            of_group = [
                (block, held)
                for block, held in zip(blocks, contents, strict=True)
                if block % self.num_groups == group
            ]
            for place, (block, held) in enumerate(of_group, last + 1 - len(of_group)):
                is_right = held is not None and held.identity == (key, group, place)
                if held is None or not is_right or (held.num_tokens < self.block_size and place != last):
                    raise RuntimeError(
                        f"request {key} reads its block {place} of group {group} in {block}, which holds {held}"
                    )
        return [held for held in contents if held]
