"""The rotary embedding as a Hugging Face config.json describes it, in its older and newer spelling.

Older files have `rope_theta` at the top and `rope_scaling` (null, or an object with `type` or `rope_type`);
since transformers 5 both are in `rope_parameters`. Where both are present `rope_scaling` wins, as there.
"""

from __future__ import annotations

from alignedserve.models.config import RopeConfig
from alignedserve.models.fields import Fields

SUPPORTED_KINDS = ("default", "linear", "llama3")
DEFAULT_THETA = 10000.0


def read_rope(config: Fields, max_position: int, default_theta: float = DEFAULT_THETA) -> RopeConfig:
    # An empty object counts as absent.
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.nested(key) or Fields({}, f"{config.where}: {key}")
    theta = rope.positive("rope_theta", config.positive("rope_theta", default_theta))
    for fields in (rope, config):
        if fields.positive("partial_rotary_factor", 1.0) != 1.0:
            raise fields.error("partial_rotary_factor", "1.0 (rotating part of a head is not supported)")
    kind = _kind(rope)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, factor=rope.positive("factor"))
    return _llama3(config, rope, theta, max_position)


def _kind(rope: Fields) -> str:
    key = "rope_type" if rope.get("rope_type") is not None else "type"
    return rope.choice(key, {kind: kind for kind in SUPPORTED_KINDS}, "default")


def _llama3(config: Fields, rope: Fields, theta: float, max_position: int) -> RopeConfig:
    original = rope.size("original_max_position_embeddings", max_position)
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"greater than low_freq_factor, which is {low}")
    return RopeConfig(
        theta,
        "llama3",
        factor=rope.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        # A value at the top level has priority.
        original_max_position=config.size("original_max_position_embeddings", original),
    )
