"""What a KV block holds. Two processes exchange blocks only if their formats are equal.

A block is contiguous over all layers, [layer, k|v, kv_head, slot, head_dim], so that it moves as one copy; a head's
slots lie together, so that attention reads them in one piece.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class BlockFormat:
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    # A key of DTYPE_BYTES.
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        values = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return values * DTYPE_BYTES[self.dtype]

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def describe(self) -> dict[str, str]:
        """Returns the fields as text for handshakes, in which a difference is named."""
        return {name: str(value) for name, value in asdict(self).items()} | {
            "layout": "layer,kv,head,slot,dim"
        }
