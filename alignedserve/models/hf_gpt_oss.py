"""The peculiarities of gpt-oss's config.json: windows in every second layer, and the mixture's activation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from alignedserve.models.config import MoeConfig
from alignedserve.models.fields import Fields
from alignedserve.models.hf_moe import read_moe
from alignedserve.models.hf_rope import RopeDefaults
from alignedserve.models.hf_windows import listed_windows

GPT_OSS_ROPE = RopeDefaults(theta=150000.0)
GPT_OSS_DEFAULTS: dict[str, Any] = {
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


def gpt_oss_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    is_null = "sliding_window" in fields.values and fields.get("sliding_window") is None
    window = None if is_null else fields.size("sliding_window", 128)
    if fields.get("layer_types") is None:
        return tuple(None if layer % 2 else window for layer in range(num_layers))
    return listed_windows(fields, num_layers, window)


def gpt_oss_moe(fields: Fields, intermediate_size: int, num_layers: int) -> MoeConfig:
    # A softmax over the chosen experts equals the softmax over all, scaled to sum to one.
    moe = read_moe(fields, intermediate_size, True, (True,) * num_layers, num_experts=128, top_k=4)
    swiglu = fields.positive("swiglu_alpha", 1.702), fields.positive("swiglu_limit", 7.0)
    return replace(moe, is_stacked=True, clamped_swiglu=swiglu)
