"""Which blocks of a request's KV are needed.

A request's tokens are cut into columns of `block_size` tokens, and a column has one block per group of layers
(`groups.py`). Sliding layers attend to the latest tokens only. The columns before the window of the next token
are *passed*: sliding layers never read them again, and the request holds no blocks of theirs there.

    columns          0 ....... num_passed ......... end .......... num_columns
    full groups      held      held                 held
    sliding groups   nothing   held                 gets them later

Every process counts blocks with these functions, so none has to send its counts to the others.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property

from alignedserve.kv.groups import LayerGroups

# Attention on CPUs reads keys in tiles of this many tokens, aligned to multiples of it (kernels/cpu/csrc/key_tile.h).
# So it also reads the keys that share a tile with the first token of the window, though they do not count.
TILE_TOKENS = 64


@dataclass(frozen=True)
class KvSpan:
    # In tokens.
    block_size: int
    # Latest tokens that a token attends to in sliding layers, itself included; 0: all.
    window: int = 0
    # The most tokens of a request that one iteration computes. Beyond its window, the request gets blocks of sliding
    # groups for no more than these. 0: it gets blocks for all of its tokens.
    max_step: int = 0
    # See LayerGroups. The full groups come first.
    num_full_groups: int = 0
    num_sliding_groups: int = 1
    tile_tokens: int = TILE_TOKENS
    # Whether sliding groups have states. These are read token by token, not in tiles.
    has_state: bool = False

    @classmethod
    def of(cls, groups: LayerGroups, block_size: int, max_step: int) -> KvSpan:
        tile_tokens = 1 if groups.has_state else TILE_TOKENS
        counts = groups.num_full, groups.num_sliding
        return cls(block_size, groups.window, max_step, *counts, tile_tokens, groups.has_state)

    @classmethod
    def of_whole_requests(cls, groups: LayerGroups, block_size: int) -> KvSpan:
        """Returns the span of requests that never pass a column."""
        return replace(cls.of(groups, block_size, max_step=0), window=0)

    @property
    def num_groups(self) -> int:
        """The number of blocks of a column that is not passed."""
        return self.num_full_groups + self.num_sliding_groups

    def num_columns(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_passed(self, num_cached: int) -> int:
        """Returns the number of columns to which, in sliding groups, no token after the first `num_cached` attends."""
        if num_cached < self.window or not self.window:
            return 0
        return (num_cached + 1 - self.window) // self.tile_tokens * self.tile_tokens // self.block_size

    def num_usable(self, num_saved: int, num_tokens: int) -> int:
        """Returns for how many of its `num_tokens` tokens a request can reuse KV that was saved when it had
        `num_saved`. Returns 0 if its next token attends to columns that were passed by then, since those were not
        saved. Also if layers have states and fewer tokens than were saved are wanted: a state goes on only where it was
        saved."""
        num_usable = min(num_saved, num_tokens - 1)
        if self.has_state and num_usable < num_saved:
            return 0
        return num_usable if self.num_passed(num_usable) == self.num_passed(num_saved) else 0

    def num_lasting(self, num_saved: int) -> int:
        """Returns for how many tokens KV that was saved for `num_saved` is of use while that of later tokens is being
        saved. A state replaces the one in the same column, and with it all of the KV is of no use."""
        return 0 if self.has_state and num_saved % self.block_size else num_saved

    def end(self, num_passed: int, num_columns: int) -> int:
        """Returns the column at which the blocks of sliding groups end, exclusive, if `num_columns` columns have blocks
        of full groups and the first `num_passed` are passed."""
        if not (self.window and self.max_step):
            return num_columns
        return min(num_columns, num_passed + self.most)

    def num_blocks(self, num_passed: int, num_columns: int) -> int:
        """Returns the number of blocks of a request that holds these columns."""
        num_sliding = self.end(num_passed, num_columns) - num_passed
        return self.num_full_groups * num_columns + self.num_sliding_groups * num_sliding

    def num_held(self, num_cached: int, num_tokens: int) -> int:
        """Returns the number of blocks that a request of `num_tokens` tokens holds, while `num_cached` of them have
        KV."""
        num_columns = -(-num_tokens // self.block_size)
        if not self.window:
            return (self.num_full_groups + self.num_sliding_groups) * num_columns
        return self.num_blocks(self.num_passed(num_cached), num_columns)

    def columns_after_passing(self, num_columns: int, num_tokens: int) -> int:
        """Returns the number of columns that a request of `num_tokens` tokens holds after it has passed some of
        `num_columns`. If all layers slide, the freed blocks pay for the column of its next token too, so it always
        holds at least one block."""
        return num_columns if self.num_full_groups else max(num_columns, self.num_columns(num_tokens))

    @cached_property
    def most(self) -> int:
        """The most columns of sliding groups that a request needs in an iteration."""
        num_seen = self.window + self.tile_tokens - 2
        return -(-(num_seen + self.max_step) // self.block_size) + 1

    def num_at_most(self, num_columns: int) -> int:
        """Returns the most blocks that a request of `num_columns` columns holds at a time."""
        return self.num_blocks(0, num_columns)

    def longest(self, num_blocks: int) -> int:
        """Returns the most columns of a request that never holds more than `num_blocks` blocks."""
        num_short = num_blocks // self.num_groups
        if not (self.window and self.max_step) or num_short < self.most:
            return num_short
        if not self.num_full_groups:
            return sys.maxsize
        return (num_blocks - self.num_sliding_groups * self.most) // self.num_full_groups

    def are_held(self, first: int, end: int, num_passed: int) -> list[bool]:
        """Returns for each block of these columns, column by column, whether a request that has passed `num_passed`
        columns holds it."""
        num_behind = max(min(num_passed, end) - first, 0)
        behind = [True] * self.num_full_groups + [False] * self.num_sliding_groups
        return behind * num_behind + [True] * (self.num_groups * (end - first - num_behind))
