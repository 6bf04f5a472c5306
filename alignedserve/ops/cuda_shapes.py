"""The steps that a GPU has graphs for: decodes in batches of given sizes, and steps with prompts of up to 2,048 tokens.

Longer steps keep a GPU busy for longer than their kernels take to launch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from alignedserve.kernels.kv_rows import head_dim_of, is_coded
from alignedserve.ops.step import StepInputs
from alignedserve.ops.step_shape import StepShape

CHUNK_TOKENS = (16, *range(32, 256, 32), *range(256, 1024, 64), *range(1024, 2048 + 1, 128))
# The most chunks in one step. For an absent chunk FlashAttention only runs a few empty programs.
MAX_CHUNKS = 16
# The most bytes of keys and values that a layer's chunks attend to. With more, launches no longer limit the speed.
MAX_CONTEXT_BYTES = 128 << 20


def decode_shapes(sizes: Iterable[int], step: StepInputs) -> list[StepShape]:
    return [StepShape(size, size, size) for size in sizes if size <= step.max_seqs]


def chunk_shapes(step: StepInputs, cache: torch.Tensor) -> list[StepShape]:
    """`cache`: [block, layer, k|v, kv_head, slot, row], as bound."""
    _, _, _, num_kv_heads, block_size, _ = cache.shape
    # 8-bit values are widened when they are gathered for FlashAttention.
    num_bytes = 2 if is_coded(cache) else cache.element_size()
    num_context = MAX_CONTEXT_BYTES // (2 * num_kv_heads * head_dim_of(cache) * num_bytes)
    longest = min(step.max_blocks_per_seq * block_size, num_context)
    most = min(step.max_tokens, CHUNK_TOKENS[-1])
    return [
        StepShape(
            num_tokens=size,
            num_outputs=min(size, step.max_seqs),
            num_decodes=step.max_seqs,
            num_chunks=min(MAX_CHUNKS, step.max_seqs),
            max_chunk_len=size,
            max_context_len=longest,
            num_context_tokens=num_context,
        )
        for size in sorted({*(tokens for tokens in CHUNK_TOKENS if tokens < most), most})
    ]
