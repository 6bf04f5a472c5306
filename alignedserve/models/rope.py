"""Rotary embedding tables, as `AttentionSpec.rope` needs them."""

from __future__ import annotations

import math

import torch

from alignedserve.models.config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, max_len: int) -> torch.Tensor:
    """Returns a table [max_len, head_dim] in float32: the cosines of head_dim/2 angles, then their sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = _scaled(1.0 / rope.theta**exponents, rope)
    angles = torch.outer(torch.arange(max_len).float(), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _scaled(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    raise ValueError(f"rope kind {rope.kind!r}: known are default, linear, llama3")


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Short wavelengths stay, long ones are stretched by `factor`, and those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original_max_position / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    is_long = wavelengths > rope.original_max_position / low
    is_short = wavelengths < rope.original_max_position / high
    return torch.where(is_long, frequencies / rope.factor, torch.where(is_short, frequencies, blended))
