"""The rotary embedding in a Hugging Face config.json, in its older and newer spelling.

Older files have `rope_theta` at the top level, and `rope_scaling` (null, or an object with `type` or `rope_type`).
Since transformers 5 both are in `rope_parameters`. If both are present, `rope_scaling` wins, as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from alignedserve.models.config import RopeConfig
from alignedserve.models.fields import MAX_SIZE, Fields

KINDS = {kind: kind for kind in ("default", "linear", "llama3", "yarn", "longrope")}
# Early Phi-3 files use other names for longrope.
PHI3_KINDS = {"default": "default"} | dict.fromkeys(("longrope", "su", "yarn"), "longrope")


@dataclass(frozen=True)
class RopeDefaults:
    """A family's peculiarities."""

    theta: float = 10000.0
    # Maps the names of kinds in the family's files to our names.
    kinds: Mapping[str, str] = field(default_factory=lambda: KINDS)
    # Whether a part of each head may stay unrotated.
    may_be_partial: bool = False


LLAMA_ROPE = RopeDefaults()


def read_rope(config: Fields, max_position: int, head_dim: int, defaults: RopeDefaults) -> RopeConfig:
    # An empty object counts as absent.
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.nested(key) or Fields({}, f"{config.where}: {key}")
    theta = rope.positive("rope_theta", config.positive("rope_theta", defaults.theta))
    partial = _partial_rotary_factor(config, rope, head_dim, defaults.may_be_partial)
    scaling = _scaling(config, rope, max_position, int(head_dim * partial), defaults.kinds)
    if scaling.kind == "yarn" and theta <= 1.0:
        raise config.error("rope_theta", "greater than 1 with YaRN")
    return replace(scaling, theta=theta, partial_rotary_factor=partial)


def _scaling(
    config: Fields, rope: Fields, max_position: int, rotary_dim: int, kinds: Mapping[str, str]
) -> RopeConfig:
    """Everything except the base frequency and the rotated share."""
    key = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.choice(key, kinds, "default")
    if kind == "default":
        return RopeConfig()
    if kind == "linear":
        return RopeConfig(kind=kind, factor=rope.positive("factor"))
    original = rope.size("original_max_position_embeddings", max_position)
    # A value at the top level has priority.
    original = config.size("original_max_position_embeddings", original)
    if kind == "llama3":
        return _llama3(rope, original)
    if kind == "yarn":
        return _yarn(rope, original, max_position)
    return _longrope(rope, original, max_position, rotary_dim)


def longest_sequence(rope: RopeConfig, max_position: int) -> int:
    """The longest sequence. With YaRN it may exceed max_position_embeddings, because users add YaRN to a file with the
    original length."""
    return (
        max(max_position, int(rope.factor * rope.original_max_position))
        if rope.kind == "yarn"
        else max_position
    )


def _partial_rotary_factor(config: Fields, rope: Fields, head_dim: int, may_be_partial: bool) -> float:
    fields = rope if rope.get("partial_rotary_factor") is not None else config
    partial = fields.positive("partial_rotary_factor", 1.0)
    if partial != 1.0 and not may_be_partial:
        raise fields.error("partial_rotary_factor", "1.0: this family rotates whole heads")
    rotary_dim = int(head_dim * partial)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise fields.error(
            "partial_rotary_factor", f"at most 1.0, and an even number times head_dim, which is {head_dim}"
        )
    return partial


def _llama3(rope: Fields, original: int) -> RopeConfig:
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"greater than low_freq_factor, which is {low}")
    return RopeConfig(
        kind="llama3",
        factor=rope.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
    )


def _yarn(rope: Fields, original: int, max_position: int) -> RopeConfig:
    if "factor" not in rope.values:
        raise rope.error(
            "factor", "a positive number, or null for max_position_embeddings over the original length"
        )
    factor = rope.positive("factor", max_position / original)
    if factor * original > MAX_SIZE:
        raise rope.error("factor", f"at most {MAX_SIZE} over the original length, which is {original}")
    fast, slow = rope.positive("beta_fast", 32.0), rope.positive("beta_slow", 1.0)
    if fast <= slow:
        raise rope.error("beta_fast", f"greater than beta_slow, which is {slow}")
    return RopeConfig(
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.flag("truncate", True),
        attention_factor=rope.positive("attention_factor", _yarn_attention(rope, factor)),
    )


def _yarn_attention(rope: Fields, factor: float) -> float:
    def scaled(mscale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0

    # Zero counts as absent here, and one without the other is ignored.
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scaled(rope.positive("mscale")) / scaled(rope.positive("mscale_all_dim"))
    return scaled(1.0)


def _longrope(rope: Fields, original: int, max_position: int, rotary_dim: int) -> RopeConfig:
    factor = rope.positive("factor", max_position / original)
    attention_factor = 1.0
    if factor > 1.0 and original > 1:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        kind="longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=rope.positive("attention_factor", attention_factor),
        short_factors=rope.positives("short_factor", rotary_dim // 2),
        long_factors=rope.positives("long_factor", rotary_dim // 2),
    )
