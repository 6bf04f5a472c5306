"""How a request's tokens lie in its blocks.

Nearly every request fills a block with K and V, from the first slot up. Two features of research do otherwise. Code
that counts blocks, or computes with their content, asks a request's layout and need not know these features.
"""

from __future__ import annotations


class Layout:
    """K and V, from the first slot up."""

    name = "plain"
    # Whether its blocks hold K and V. If not, these are computed from the blocks in each iteration, so other requests
    # and other processes can't use the blocks.
    holds_kv = True
    # Whether it fills its blocks from the last slot down.
    is_reversed = False

    def tokens_per_block(self, block_size: int) -> int:
        """`block_size`: the tokens of K and V that a block holds."""
        return block_size

    def num_columns(self, num_tokens: int, block_size: int) -> int:
        return -(-num_tokens // self.tokens_per_block(block_size))

    def __repr__(self) -> str:
        return self.name


class _Reversed(Layout):
    """K and V, from the last slot down, so that another request can use the first slots."""

    name, is_reversed = "reversed", True


class _Inputs(Layout):
    """The inputs of each layer in place of K and V (`ops/kept_inputs.py`): half as many bytes."""

    name, holds_kv = "inputs", False

    def tokens_per_block(self, block_size: int) -> int:
        return 2 * block_size


PLAIN, REVERSED, INPUTS = Layout(), _Reversed(), _Inputs()
