"""Paged attention in plain torch, sequence by sequence, with the weights in float32."""

from __future__ import annotations

import torch

from alignedserve.kernels.kv_rows import as_movable, from_rows, to_rows
from alignedserve.kv.groups import GroupedLayer
from alignedserve.ops.base import AttentionSpec
from alignedserve.ops.step import StepInputs


def paged_attention(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    step: StepInputs,
    spec: AttentionSpec,
    place: GroupedLayer,
) -> torch.Tensor:
    """`place`: where the layer's KV is in the cache. KV of sequences that keep inputs has been restored."""
    num_tokens = step.num_tokens
    heads = qkv.view(num_tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    positions = step.positions[:num_tokens].long()
    q = rotate(head_norm(q, spec.q_norm, spec.norm_eps), positions, spec.rope)
    k = rotate(head_norm(k, spec.k_norm, spec.norm_eps), positions, spec.rope)

    slots = step.slots[place.group, :num_tokens].long()
    out = torch.empty(num_tokens, spec.num_heads, spec.head_dim, dtype=qkv.dtype, device=qkv.device)
    kept = step.kept_inputs if step.keeps_inputs else None
    if kept is None:
        write_kv(k, v, cache, place.index, slots)
        is_kept = [0] * step.num_seqs
    else:
        restored = kept.rows[:num_tokens] >= 0
        write_kv(k[~restored], v[~restored], cache, place.index, slots[~restored])
        write_kv(k[restored], v[restored], kept.restored_kv, 0, slots[restored])
        is_kept = kept.host_is_kept[: step.num_seqs].tolist()
    for seq in range(step.num_seqs):
        if kept is not None and is_kept[seq]:
            attend_sequence(q, kept.restored_kv, GroupedLayer(0, 0), step, seq, spec, out)
        else:
            attend_sequence(q, cache, place, step, seq, spec, out)
    out = out.flatten(1)
    return step.output_rows(out) if spec.outputs_only else out


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, layer: int, slots: torch.Tensor) -> None:
    """Writes k and v [tokens, kv heads, dim] into these slots of this layer of the cache."""
    rows = as_movable(cache)
    keys, values = rows[:, layer, 0], rows[:, layer, 1]
    block_size = cache.shape[4]
    block, slot = slots // block_size, slots % block_size
    keys[block, :, slot], values[block, :, slot] = (as_movable(to_rows(x, cache.dtype)) for x in (k, v))


def attend_sequence(
    q: torch.Tensor,
    cache: torch.Tensor,
    place: GroupedLayer,
    step: StepInputs,
    seq: int,
    spec: AttentionSpec,
    out: torch.Tensor,
) -> None:
    """Attends for one sequence's tokens over its blocks, which contain their k and v. q, out: [tokens, heads, dim]."""
    start, end = step.host.query_start[seq : seq + 2].tolist()
    if start == end:
        return
    context_len = int(step.host.context_len[seq])
    block_size = cache.shape[4]
    # Blocks before the window may have been freed.
    num_behind = context_len - (end - start) + 1 - spec.sliding_window if spec.sliding_window else 0
    first = max(num_behind, 0) // block_size
    blocks = step.block_table_of(place.group)[seq, first : -(-context_len // block_size)].long()
    # [block, k|v, kv_head, slot, head_dim]
    held = as_movable(cache)[blocks, place.index].view(cache.dtype)
    held = from_rows(held)
    if step.host.is_reversed[seq]:
        held = held.flip(3)
    num_skipped = first * block_size
    keys, values = (
        held[:, k_or_v].transpose(1, 2).flatten(0, 1)[: context_len - num_skipped] for k_or_v in (0, 1)
    )
    positions = step.positions[start:end].long() - num_skipped
    out[start:end] = attend(q[start:end], keys, values, positions, spec)


def head_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return x
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor | None) -> torch.Tensor:
    """Rotates by Hugging Face's convention: the rotated values' two halves are the first and second parts of the
    pairs. Values beyond the table's width stay."""
    if rope is None:
        return x
    cos, sin = rope[positions].unsqueeze(1).chunk(2, dim=-1)
    wide = x.float()
    (low, high), rest = wide[..., : rope.shape[1]].chunk(2, dim=-1), wide[..., rope.shape[1] :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1).to(x.dtype)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Attends with q [queries, heads, dim] at `positions` over k and v [context, kv heads, dim] at 0, 1, ..."""
    group = spec.num_heads // spec.num_kv_heads
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * spec.scale
    behind = positions.unsqueeze(1) - torch.arange(k.shape[0], device=k.device)
    hidden = behind < 0
    if spec.sliding_window is not None:
        hidden |= behind >= spec.sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sinks = spec.sinks.float().view(-1, 1, 1).expand(-1, len(q), 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[:, :, :-1]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
