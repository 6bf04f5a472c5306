"""The blocks that one owner holds: a request, or KV on its way to another instance."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.kv.layout import PLAIN, Layout
from alignedserve.types import BlockId

# Stands for a block that its owner has given up or passed.
NO_BLOCK = BlockId(-1)


@dataclass(eq=False, slots=True)
class Held:
    """Only `instance/memory.py` changes its blocks and counts. An engine reads `groups`."""

    # By layer group and column. Empty if it holds nothing.
    groups: list[list[BlockId]] = field(init=False, default_factory=list)
    # Blocks that it has, and that the plan under way gives it.
    num_blocks: int = field(init=False, default=0)
    # Columns that its blocks cover, and the first ones that it has passed (`span.py`). In all layer groups it has
    # blocks up to column `end`, exclusive.
    num_columns: int = field(init=False, default=0)
    num_passed: int = field(init=False, default=0)
    end: int = field(init=False, default=0)
    # Its first columns, with blocks that others had filled when it began.
    num_shared: int = field(init=False, default=0)
    # How its tokens lie in its blocks. Set before it gets any.
    layout: Layout = field(default=PLAIN, kw_only=True)

    @property
    def blocks(self) -> list[BlockId]:
        """Those of the first layer group."""
        return self.groups[0] if self.groups else []
