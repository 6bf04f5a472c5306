"""Rotary embedding tables, as `AttentionSpec.rope` needs them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from alignedserve.models.config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, max_len: int) -> torch.Tensor:
    """Returns a table [max_len, rotary_dim] in float32: the cosines of rotary_dim/2 angles, then their sines.

    `max_len` is the longest sequence that is possible. It decides which of longrope's factors apply.
    """
    rotary_dim = int(head_dim * rope.partial_rotary_factor)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    frequencies = _frequencies(rope.theta**exponents, rope, max_len)
    angles = torch.outer(torch.arange(max_len).float(), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=1) * rope.attention_factor


def _frequencies(periods: torch.Tensor, rope: RopeConfig, max_len: int) -> torch.Tensor:
    """`periods`: tokens after which each unscaled angle has grown by one."""
    if rope.kind == "longrope":
        factors = rope.long_factors if max_len > rope.original_max_position else rope.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods)
    if rope.kind not in _SCALINGS:
        raise ValueError(f"rope kind {rope.kind!r}: known are {', '.join(_SCALINGS)}, longrope")
    return _SCALINGS[rope.kind](periods, rope)


def _default(periods: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    return 1.0 / periods


def _linear(periods: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    return 1.0 / periods / rope.factor


def _llama3(periods: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Keeps short wavelengths, stretches long ones by `factor`, and blends those between."""
    frequencies = 1.0 / periods
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original_max_position / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    is_long = wavelengths > rope.original_max_position / low
    is_short = wavelengths < rope.original_max_position / high
    return torch.where(is_long, frequencies / rope.factor, torch.where(is_short, frequencies, blended))


def _yarn(periods: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Keeps frequencies with at least `beta_fast` turns within the original length, divides those with at most
    `beta_slow` turns by `factor`, and blends those between by their index."""
    begin, end = (_number_of_turns(turns, rope, len(periods)) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, 2 * len(periods) - 1)
    if begin == end:
        # The blend must have a width.
        end += 0.001
    slowed = ((torch.arange(len(periods), dtype=torch.float32) - begin) / (end - begin)).clamp(0, 1)
    kept = 1 - slowed
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _number_of_turns(turns: float, rope: RopeConfig, num_frequencies: int) -> float:
    """Returns the index, counted from the fastest, of the frequency with this number of turns within the original
    length."""
    wavelength = rope.original_max_position / turns / (2 * math.pi)
    return num_frequencies * math.log(wavelength) / math.log(rope.theta)


_SCALINGS: dict[str, Callable[[torch.Tensor, RopeConfig], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
