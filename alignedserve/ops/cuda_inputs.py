"""Attention on a GPU in a step with kept inputs: the same kernels, called twice.

Sequences with kept inputs are the last ones among decodes, and among chunks (`engine/batch.py`). Each call therefore
has a run of sequences: the first call reads the cache, the second one restored KV. Such steps are not captured, and
wait for the GPU in between. All layers are one group (`kv/groups.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from alignedserve.kernels.triton.decode_attention import decode_tuning, plain_attention
from alignedserve.kernels.triton.gather_kv import gather_kv
from alignedserve.kernels.triton.paged_attention import PagedStep
from alignedserve.kernels.triton.rope_write import rope_write
from alignedserve.ops.base import AttentionSpec
from alignedserve.ops.kept_inputs import KeptInputs
from alignedserve.ops.step import StepInputs
from alignedserve.ops.torch_attention import attend


@dataclass(frozen=True)
class Part:
    """Some of a step's sequences, with all of their K and V in one cache."""

    # Attention reads one layer of the cache.
    cache: torch.Tensor
    layer: int
    # -1 for the tokens of other sequences.
    slots: torch.Tensor
    # Sequences that compute one token.
    decodes: range
    chunks: range


def parts_of(step: StepInputs, kept: KeptInputs, cache: torch.Tensor, layer: int) -> tuple[Part, Part]:
    """Returns the sequences with K and V in the cache, and those with restored KV."""
    num_decodes, slots = step.shape.num_decodes, step.slots[0, : step.num_tokens]
    is_kept = kept.rows[: step.num_tokens] >= 0
    first_decode = num_decodes - int(kept.host_is_kept[:num_decodes].sum())
    first_chunk = step.num_seqs - int(kept.host_is_kept[num_decodes : step.num_seqs].sum())
    return (
        Part(
            cache, layer, slots.masked_fill(is_kept, -1), range(first_decode), range(num_decodes, first_chunk)
        ),
        Part(
            kept.restored_kv,
            0,
            slots.masked_fill(~is_kept, -1),
            range(first_decode, num_decodes),
            range(first_chunk, step.num_seqs),
        ),
    )


def write_part(qkv: torch.Tensor, step: StepInputs, spec: AttentionSpec, part: Part) -> torch.Tensor:
    """Writes K and V of the part's tokens, and returns q. Other rows of it are undefined."""
    return rope_write(
        qkv,
        step.positions[: len(qkv)],
        part.slots,
        part.cache,
        part.layer,
        spec.num_heads,
        rope=spec.rope,
        q_norm=spec.q_norm,
        k_norm=spec.k_norm,
        eps=spec.norm_eps,
    )


def decode_part(
    q: torch.Tensor, step: StepInputs, spec: AttentionSpec, part: Part, out: torch.Tensor
) -> None:
    first, num_seqs = part.decodes.start, len(part.decodes)
    if not num_seqs:
        return
    paged = PagedStep(
        query_start=step.query_start[first : first + num_seqs + 1],
        context_len=step.context_len[first : first + num_seqs],
        block_table=step.flat_block_table[first * step.num_columns :],
        table_stride=step.table_stride,
        num_seqs=num_seqs,
    )
    tuning = decode_tuning(spec.num_heads // spec.num_kv_heads, spec.head_dim, q.element_size())
    layer, window = part.cache[:, part.layer], spec.sliding_window
    plain_attention(q, layer, paged, spec.scale, window, out, tuning, spec.sinks)


def gather_part(
    step: StepInputs, spec: AttentionSpec, part: Part
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns k and v of the contexts of all chunks in the part, and the start of each context."""
    first = part.chunks.start - step.shape.num_decodes
    context_start = step.context_start[first : first + len(part.chunks) + 1]
    context_start = context_start - context_start[0]
    num_tokens = int(step.host.context_len[part.chunks.start : part.chunks.stop].sum())
    shape = (num_tokens, spec.num_kv_heads, spec.head_dim)
    k, v = (torch.empty(shape, dtype=part.cache.dtype, device=part.cache.device) for _ in range(2))
    first_row = step.first_chunk + first
    gather_kv(
        part.cache, part.layer, step.flat_block_table, step.table_stride, first_row, context_start, k, v
    )
    return k, v, context_start


def chunks_plainly(
    q: torch.Tensor, step: StepInputs, spec: AttentionSpec, part: Part, out: torch.Tensor
) -> None:
    """Attends chunk by chunk, without FlashAttention."""
    k, v, context_start = gather_part(step, spec, part)
    ends = context_start.tolist()
    for index, seq in enumerate(part.chunks):
        start, end = step.host.query_start[seq : seq + 2].tolist()
        context = slice(ends[index], ends[index + 1])
        positions = step.positions[start:end].long()
        out[start:end] = attend(q[start:end], k[context], v[context], positions, spec)
