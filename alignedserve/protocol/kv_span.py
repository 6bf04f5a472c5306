"""Which blocks of a request's KV are needed. Where all layers of a model attend to the latest tokens only, the blocks
before the window of the next token are *passed*: nothing reads them again, and the request does not hold them.

    0 ........ num_passed ................ end
    nothing    blocks that are held        blocks that it gets later

All that counts blocks goes by this, so that none has to tell the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

# Attention on CPUs reads keys in tiles of so many, from multiples of that on (kernels/cpu/csrc/key_tile.h): what lies
# in the same tile as the first token of the window is read, though it does not count.
TILE_TOKENS = 64


@dataclass(frozen=True)
class KvSpan:
    # Tokens.
    block_size: int
    # How many of the latest tokens a token attends to in every layer, itself included; 0: all.
    window: int = 0
    # The most tokens of a request that one iteration computes: beyond its window it gets blocks for no more. 0: it gets
    # blocks for all of its tokens.
    max_step: int = 0

    def num_passed(self, num_cached: int) -> int:
        """How many blocks the token after the first `num_cached` does not attend to, nor any later one."""
        if num_cached < self.window or not self.window:
            return 0
        return (num_cached + 1 - self.window) // TILE_TOKENS * TILE_TOKENS // self.block_size

    def end(self, num_cached: int, num_tokens: int) -> int:
        """The blocks of a request of so many tokens end with this one, exclusive, while `num_cached` have KV."""
        whole = -(-num_tokens // self.block_size)
        if not (self.window and self.max_step):
            return whole
        return min(whole, self.num_passed(num_cached) + self.most)

    def num_held(self, num_cached: int, num_tokens: int) -> int:
        return self.end(num_cached, num_tokens) - self.num_passed(num_cached)

    @cached_property
    def most(self) -> int:
        """The most blocks that the request needs in an iteration."""
        num_seen = self.window + TILE_TOKENS - 2
        return -(-(num_seen + self.max_step) // self.block_size) + 1
