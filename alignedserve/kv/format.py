"""The layout of a KV block. Two processes exchange blocks only if their formats are equal.

A block is contiguous over all layers of a group (`groups.py`), in most models all layers: [layer, k|v, kv_head,
slot, head_dim]. So it moves as one copy. The slots of a head are adjacent, so attention reads them in one piece. If an
instance has several ranks, a block holds the KV of all of them, one rank after another. The pool stores whole columns:
the blocks of all groups, one after another.

A request may keep the inputs of each layer in place of K and V (`ops/kept_inputs.py`), if K is as wide as the inputs. A
block of the same size then holds twice as many tokens. Such blocks never leave their instance.

In the pool a block may be `kv-int8`: one byte per value. Each channel (a layer's k or v, a head, an index of head_dim)
also stores the least and the greatest of its values in this block. The 256 codes are evenly spaced between them, so
scale and zero point follow from the block alone:

    [layer, k|v, kv_head, low|high, head_dim] in the dtype, then [layer, k|v, kv_head, slot, head_dim] codes

An instance itself may also hold KV in 8 bits. `kv-fp8` is one byte per value. `kv-int8-rows` adds a scale for each
token's K or V of one head, after its codes (`kernels/kv_rows.py`). The pool stores such blocks as the instance holds
them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# The encodings of an instance's blocks, by `kv_cache_dtype`.
KV_CACHE_DTYPES = {"auto": "kv", "fp8": "kv-fp8", "int8": "kv-int8-rows"}
# Torch's names for the elements of such blocks, if they are not in the model's dtype.
_TORCH_DTYPES = {"kv-fp8": "float8_e4m3fn", "kv-int8-rows": "int8"}
# The encodings of the pool's blocks, by `pool_kv_dtype`. auto: the encoding of the instances.
POOL_KV_DTYPES = {"auto": "kv", "int8": "kv-int8"}
# Bytes of a `kv-int8-rows` row after its codes.
_SCALE_BYTES = 4


# Blocks per block of restored KV. Few requests keep inputs at a time, and fewer run in one iteration.
BLOCKS_PER_RESTORED = 4


def num_restored_blocks(num_blocks: int, longest: int) -> int:
    """Returns the number of blocks of restored KV beside `num_blocks` others. `longest`: the blocks of the longest
    request."""
    return max(longest, num_blocks // BLOCKS_PER_RESTORED)


def check_pool_kv_dtype(pool_kv_dtype: str, kv_cache_dtype: str) -> None:
    """Raises ValueError if the pool can't store KV in this encoding when the instances hold it in theirs."""
    if pool_kv_dtype not in POOL_KV_DTYPES:
        raise ValueError(f"pool_kv_dtype={pool_kv_dtype!r}: must be one of {', '.join(POOL_KV_DTYPES)}")
    if pool_kv_dtype != "auto" and kv_cache_dtype != "auto":
        raise ValueError(
            f"pool_kv_dtype={pool_kv_dtype!r} and kv_cache_dtype={kv_cache_dtype!r}: one of them must be auto, since "
            "the pool stores 8-bit KV as instances hold it"
        )


def check_verify_blocks(share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"verify_blocks={share}: must be from 0 to 1")


def is_lossy(pool_encoding: str) -> bool:
    """Returns whether KV changes when it is stored in the pool in this encoding."""
    return pool_encoding in {each for name, each in POOL_KV_DTYPES.items() if name != "auto"}


@dataclass(frozen=True)
class BlockFormat:
    num_layers: int
    block_size: int
    # Heads per rank.
    num_kv_heads: int
    head_dim: int
    # A key of DTYPE_BYTES: the dtype of the values that attention reads.
    dtype: str
    # In an instance a value of KV_CACHE_DTYPES; in the pool also one of POOL_KV_DTYPES.
    encoding: str = "kv"
    # Each rank of an instance holds some of the heads. In the pool a block holds one rank's part after another.
    num_ranks: int = 1
    # See LayerGroups. `num_layers` counts one group's layers.
    num_groups: int = 1
    # Whether some blocks hold states. Those fit as they are, in float32, and are moved as they are.
    has_state: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a rank's part of an instance's block, in elements of `torch_dtype`."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self._row_len)

    @property
    def torch_dtype(self) -> str:
        """Torch's name for the elements of an instance's block."""
        return _TORCH_DTYPES.get(self.encoding, self.dtype)

    @property
    def _row_len(self) -> int:
        return self.head_dim + (_SCALE_BYTES if self.encoding == "kv-int8-rows" else 0)

    @property
    def num_channels(self) -> int:
        return self.num_ranks * self.num_layers * 2 * self.num_kv_heads * self.head_dim

    @property
    def block_bytes(self) -> int:
        dtype_bytes = DTYPE_BYTES[self.dtype]
        if self.encoding == "kv-int8":
            return self.num_channels * (self.block_size + 2 * dtype_bytes)
        if self.encoding != "kv":
            return self.num_channels // self.head_dim * self.block_size * self._row_len
        return self.num_channels * self.block_size * dtype_bytes

    def num_columns(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def column_bytes(self) -> int:
        """The bytes of all groups' blocks for the same tokens."""
        return self.num_groups * self.block_bytes

    @property
    def token_bytes(self) -> float:
        """The bytes of a token in all groups."""
        return self.column_bytes / self.block_size

    @property
    def layer_bytes(self) -> int:
        """The bytes of one layer of a block."""
        return self.block_bytes // self.num_layers

    def in_pool(self, pool_kv_dtype: str) -> BlockFormat:
        """Returns the format of these blocks in the pool. Raises ValueError if the pool can't store them so."""
        of_instances = next(name for name, each in KV_CACHE_DTYPES.items() if each == self.encoding)
        check_pool_kv_dtype(pool_kv_dtype, of_instances)
        if self.has_state and pool_kv_dtype != "auto":
            raise ValueError(
                f"pool_kv_dtype={pool_kv_dtype!r}: must be auto for a model that has layers with a state"
            )
        return self if pool_kv_dtype == "auto" else replace(self, encoding=POOL_KV_DTYPES[pool_kv_dtype])

    def describe(self) -> dict[str, str]:
        """Returns the fields as text for handshakes, which report a difference by name."""
        layout = "group,rank,layer,kv,head,slot,dim" + (" and states" if self.has_state else "")
        fields = {name: str(value) for name, value in asdict(self).items() if name != "has_state"}
        return fields | {"layout": layout}
