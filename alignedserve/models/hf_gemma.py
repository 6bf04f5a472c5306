"""The peculiarities of Gemma 3's config.json: omitted sizes, two ropes, windows by a pattern, a text_config."""

from __future__ import annotations

from typing import Any

from alignedserve.models.config import RopeConfig
from alignedserve.models.fields import Fields
from alignedserve.models.hf_rope import RopeDefaults, read_rope
from alignedserve.models.hf_windows import listed_windows

# Published files omit sizes that equal these.
GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "head_dim": 256,
    "tie_word_embeddings": True,
}
# In a vision model's file, these keys stand beside text_config and apply to the whole model.
_OF_ALL = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")


def text_fields(fields: Fields) -> Fields:
    text = fields.nested("text_config")
    if text is None:
        raise fields.error("text_config", "an object")
    return Fields(
        {**text.values, **{key: fields.get(key) for key in _OF_ALL if fields.get(key) is not None}},
        text.where,
    )


def refuse_other_gemma(fields: Fields) -> Fields:
    """Raises ValueError for features of Gemma 2 and of embedding models, which no generating Gemma 3 has."""
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if fields.get(key) is not None:
            raise fields.error(key, "null: capped scores and logits are not supported")
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "false: attention is causal here")
    return fields


def global_fields(fields: Fields) -> Fields:
    """Returns the fields with the full layers' rope in the spelling of other families."""
    # In older files rope_scaling is meant for these layers. hidden_act is cleared: Gemma's key is hidden_activation.
    over = fields.nested("rope_scaling")
    scaling = {**_rope_of(fields, "full_attention"), **(over.values if over else {})}
    return Fields(
        {**fields.values, "rope_parameters": scaling, "rope_scaling": None, "hidden_act": None}, fields.where
    )


def local_rope(fields: Fields, max_position: int, head_dim: int) -> RopeConfig:
    """The rope of the sliding layers."""
    theta = fields.positive("rope_local_base_freq", 1e4)
    rope = {
        "rope_parameters": _rope_of(fields, "sliding_attention"),
        "rope_scaling": None,
        "rope_theta": None,
    }
    return read_rope(
        Fields({**fields.values, **rope}, fields.where), max_position, head_dim, RopeDefaults(theta)
    )


def _rope_of(fields: Fields, kind: str) -> dict[str, Any]:
    ropes = fields.nested("rope_parameters")
    found = None if ropes is None else ropes.nested(kind)
    return {} if found is None else dict(found.values)


def gemma3_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = fields.size("sliding_window", 4096)
    if fields.get("layer_types") is not None:
        return listed_windows(fields, num_layers, window)
    # One of every `pattern` layers has none.
    pattern = fields.size("sliding_window_pattern", 6)
    return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
