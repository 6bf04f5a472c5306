"""Kept inputs in plain torch: writing them, and restoring K and V from them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from alignedserve.ops.base import AttentionSpec, Projected, Value
from alignedserve.ops.kept_inputs import KeptInputs, rows_of_layer
from alignedserve.ops.step import StepInputs
from alignedserve.ops.torch_attention import head_norm, rotate, write_kv

# Tokens that are restored at a time, so that intermediate values stay small.
PIECE = 4096


def restore(
    step: StepInputs,
    cache: torch.Tensor,
    spec: AttentionSpec,
    projected: Projected | None,
    plain: Callable[[Value], torch.Tensor] = lambda x: x,
) -> None:
    """Writes the step's kept inputs, and restores KV from those of earlier steps. Does nothing in a step without any.
    `plain` returns a backend's value as a tensor."""
    kept = step.kept_inputs
    if kept is None or not step.keeps_inputs:
        return
    if projected is None:
        raise ValueError("keeping inputs needs attention with `projected`")
    _write_inputs(plain(projected.x), cache, spec.layer, kept)
    to_kv = projected.weight.outputs_from(spec.num_heads * spec.head_dim)
    _restore(to_kv.project, cache, spec, kept)


def _write_inputs(x: torch.Tensor, cache: torch.Tensor, layer: int, kept: KeptInputs) -> None:
    """Writes the inputs `x` [tokens, width] of those tokens that keep them."""
    blocks = rows_of_layer(cache, layer)
    rows = kept.rows[: len(x)].long()
    is_kept = rows >= 0
    rows = rows[is_kept]
    blocks[rows // blocks.shape[1], rows % blocks.shape[1]] = x[is_kept]


def _restore(
    to_kv: Callable[[torch.Tensor], torch.Tensor], cache: torch.Tensor, spec: AttentionSpec, kept: KeptInputs
) -> None:
    """Projects K and V of all tokens to be restored. `to_kv`: the part of the qkv projection for K and V."""
    blocks = rows_of_layer(cache, spec.layer)
    for start in range(0, kept.num_restored, PIECE):
        piece = slice(start, min(start + PIECE, kept.num_restored))
        rows = kept.sources[piece].long()
        x = blocks[rows // blocks.shape[1], rows % blocks.shape[1]]
        kv = to_kv(x).view(len(x), 2, spec.num_kv_heads, spec.head_dim)
        k = rotate(head_norm(kv[:, 0], spec.k_norm, spec.norm_eps), kept.positions[piece].long(), spec.rope)
        write_kv(k, kv[:, 1], kept.restored_kv, 0, kept.targets[piece].long())
