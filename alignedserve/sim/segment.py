"""The contents of the blocks of the pool's segment, in the detail in which they can be wrong: the request, the
position, and the number of tokens. Each block holds the KV of one layer group: block `num_groups` * p + g is that of
group g of the column in the pool's block p.

Real copies move bytes without checking them. Here it is an error to read anything but the expected content, at the
start and at the end of the read. So is a write into a block that another copy is writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from alignedserve.kv.layout import PLAIN, Layout
from alignedserve.kv.span import KvSpan
from alignedserve.kvpool.owners import OwnerTable
from alignedserve.types import PoolBlockId, RequestKey


class Content(NamedTuple):
    """The content of a block."""

    key: RequestKey
    # The index of its column within the request.
    place: int
    num_tokens: int
    # The hash of its tokens and all before them: see kv_model.py.
    digest: int = 0
    # The layer group of its KV.
    group: int = 0
    # The number of the flipped bit from which it is computed or copied: see kv_model.py. 0: it is right.
    flaw: int = 0
    # How it lies in its block. It is of use only to requests with the same layout.
    layout: Layout = PLAIN

    @property
    def identity(self) -> tuple[RequestKey, int, int]:
        return self.key, self.group, self.place


class Write:
    """A copy into blocks that is under way. Until it is done, the blocks keep their content if it is of the same kind;
    otherwise they hold nothing. KV of later tokens is added to what a block holds, while a state replaces it."""

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
            is_state = segment.span.has_state and content.group >= segment.span.num_full_groups
            is_replaced = is_state and held and held.num_tokens != content.num_tokens
            if held and (held.identity != content.identity or is_replaced):
                del segment.contents[block]

    def finish(self) -> None:
        for block, content in self._places:
            self._segment.contents[block] = content
            self._segment.changed.discard(block)
            self._segment.marked.discard(block)
        self.abandon()

    def abandon(self) -> None:
        for block, _ in self._places:
            del self._segment.writes[block]


class SimSegment:
    def __init__(self, name: str, num_blocks: int, span: KvSpan) -> None:
        """`num_blocks`: counts whole columns, as the pool does."""
        self.name = name
        self.num_blocks = num_blocks
        self.span = span
        self.num_groups = span.num_groups
        # The owner table. In a real segment it is stored there, so that a restarted pool finds it.
        self.owners = OwnerTable.plain(num_blocks)
        self.contents: dict[PoolBlockId, Content] = {}
        self.writes: dict[PoolBlockId, Write] = {}
        # Blocks with content that has changed since it was saved. Checksums would say the same.
        self.changed: set[PoolBlockId] = set()
        # Those among them that a load has found. No load copies them.
        self.marked: set[PoolBlockId] = set()

    @property
    def blocks(self) -> SimSegment:
        """Its memory, as `SimTransfers.use_pool` takes it."""
        return self

    @property
    def checksums(self) -> None:
        """See `changed`."""

    def flip_bit(self, number: int, flaw: int) -> None:
        """Changes the KV of one of the blocks with content. Does nothing if there are none."""
        if self.contents:
            block = sorted(self.contents)[number % len(self.contents)]
            self.changed.add(block)
            held = self.contents[block]
            self.contents[block] = held._replace(flaw=held.flaw or flaw)

    def close(self) -> None:
        """Unmaps it. Transfers know which segment they have mapped."""

    def write(self, places: Sequence[tuple[PoolBlockId, Content]]) -> Write:
        for block, content in places:
            if block % self.num_groups != content.group:
                raise RuntimeError(f"block {block} of {self.num_groups} groups is to hold {content}")
        return Write(self, places)

    def read(self, key: RequestKey, blocks: Sequence[PoolBlockId]) -> list[Content]:
        """Returns the contents of a request's consecutive columns, up to the same last column in each group. All
        columns before the last are full. The caller knows which of them it needs, and how much of the last.

        Another request with the same first tokens may have written them. Whether they are the same is checked before
        the KV is used, by its hash."""
        contents = [self.contents.get(block) for block in blocks]
        last = contents[-1].place if contents and contents[-1] else 0
        for group in range(self.num_groups):
            of_group = [
                (block, held)
                for block, held in zip(blocks, contents, strict=True)
                if block % self.num_groups == group
            ]
            for place, (block, held) in enumerate(of_group, last + 1 - len(of_group)):
                is_right = held is not None and (held.group, held.place) == (group, place)
                if held is None or not is_right or (held.num_tokens < self.span.block_size and place != last):
                    raise RuntimeError(
                        f"request {key} reads its block {place} of group {group} in {block}, which holds {held}"
                    )
        return [held._replace(key=key) for held in contents if held]
