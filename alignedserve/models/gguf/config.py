"""The config.json and generation_config.json that transformers would write for the model of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from alignedserve.models.fields import Fields
from alignedserve.models.gguf.container import FLOAT_TYPES, Header, types_of
from alignedserve.models.gguf.names import CONFIG_TENSORS, ROPE_FREQS, ROPE_LONG, ROPE_SHORT

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EMBEDDING = "token_embd.weight"
# Tokens that end a turn, whatever they are called in the metadata.
_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<EOT>",
)
# In gpt-oss's format it ends a message, and another one may follow.
_NO_END_BESIDE = {"<|end|>": "<|return|>"}
# Types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
# Keys that are read, with any type of scaling and with those that scale attention.
_SCALING = ("type", "factor", "original_context_length", "finetuned")
_SCALING_OF_ATTENTION = ("attn_factor", "yarn_beta_fast", "yarn_beta_slow")
# Values that change nothing. llama.cpp writes them into files of models without scaling.
_NEUTRAL = {"rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_log_multiplier": 0.0}


class Metadata:
    """A header's values. Keys are those of the architecture, unless they begin with a dot."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.tensors = header.tensors
        self._fields = Fields(header.metadata, str(header.path))
        self.architecture = self._fields.choice(
            "general.architecture", {name: name for name in ARCHITECTURES}, ""
        )

    def has(self, key: str) -> bool:
        """Files may have 0 for what a model does not have."""
        return self._fields.get(self._key(key)) is not None and not self.is_zero(key)

    def is_zero(self, key: str) -> bool:
        found = self._fields.get(self._key(key))
        return type(found) in (int, float) and found == 0

    def size(self, key: str, default: int | None = None) -> int:
        return self._fields.size(self._key(key), default)

    def positive(self, key: str, default: float | None = None) -> float:
        return self._fields.positive(self._key(key), default)

    def token_id(self, key: str) -> int | None:
        return self._fields.token_id(f"tokenizer.ggml.{key}_token_id")

    def error(self, key: str, allowed: str) -> ValueError:
        return self._fields.error(self._key(key), allowed)

    def choice(self, key: str, names: dict[str, str], default: str) -> str:
        return self._fields.choice(self._key(key), names, default)

    def _key(self, key: str) -> str:
        return f"{self.architecture}.{key}"


def config_of(header: Header) -> dict[str, Any]:
    """Raises ValueError if a key is missing or impossible, or if the architecture is not supported."""
    metadata = Metadata(header)
    return ARCHITECTURES[metadata.architecture](metadata)


def generation_config_of(header: Header) -> dict[str, Any]:
    """Lists the tokens that end an answer."""
    metadata = Metadata(header)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    named = [metadata.token_id(key) for key in ("eos", "eot", "eom")]
    found = [token for token in named if token is not None]
    if isinstance(tokens, list):
        ids = {text: number for number, text in enumerate(tokens)}
        kinds = kinds_of(header, len(tokens))
        found += [
            ids[text]
            for text in _ENDS
            if text in ids
            and _NO_END_BESIDE.get(text) not in ids
            and (kinds is None or kinds[ids[text]] == CONTROL)
        ]
    return {"eos_token_id": list(dict.fromkeys(found))}


def kinds_of(header: Header, num_tokens: int) -> list[int] | None:
    """Returns the types of tokens, if the file has them. Files have ends of turns among the tokens of users."""
    found = header.numbers("tokenizer.ggml.token_type", num_tokens)
    if found is None:
        return None
    texts = header.metadata["tokenizer.ggml.tokens"]
    return [
        CONTROL if kind != NORMAL and text in _ENDS else kind
        for kind, text in zip(found.tolist(), texts, strict=True)
    ]


def _common(metadata: Metadata, family: str, inner: str = "feed_forward_length") -> dict[str, Any]:
    hidden, num_heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    head_dim = metadata.size("attention.key_length", max(hidden // num_heads, 1))
    if metadata.size("attention.value_length", head_dim) != head_dim:
        raise metadata.error("attention.value_length", f"{head_dim}, as attention.key_length")
    types = types_of(
        entry
        for name, entry in metadata.tensors.items()
        if len(entry.shape) > 1 and name not in CONFIG_TENSORS
    )
    coded = [each for each in types if each not in FLOAT_TYPES]
    quantised = {"quantization_config": {"quant_method": "gguf", "types": coded}} if coded else {}
    return quantised | {
        "architectures": [family],
        "vocab_size": _vocab_size(metadata),
        "hidden_size": hidden,
        "num_hidden_layers": metadata.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "intermediate_size": metadata.size(inner),
        "max_position_embeddings": metadata.size("context_length"),
        "rms_norm_eps": metadata.positive("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.positive("rope.freq_base", 10000.0),
        "partial_rotary_factor": metadata.size("rope.dimension_count", head_dim) / head_dim,
        "rope_scaling": _rope_scaling(metadata),
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        # Codes have no dtype of their own.
        "dtype": "bfloat16" if coded or not types else _DTYPES[types[0]],
        **{f"{key}_token_id": metadata.token_id(key) for key in ("bos", "eos")},
        "pad_token_id": metadata.token_id("padding"),
    }


def _vocab_size(metadata: Metadata) -> int:
    entry = metadata.tensors.get(_EMBEDDING)
    if entry is None or len(entry.shape) != 2:
        raise ValueError(f"{metadata.header.path}: tensor {_EMBEDDING} is missing, or has not two dimensions")
    if entry.dtype == "MXFP4":
        raise ValueError(
            f"{metadata.header.path}: tensor {_EMBEDDING} has type MXFP4, which can't be looked up"
        )
    return entry.shape[0]


def _rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    short, long, freqs = (metadata.header.factors.get(each) for each in (ROPE_SHORT, ROPE_LONG, ROPE_FREQS))
    kinds = {"none": "none", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}
    kind = metadata.choice("rope.scaling.type", kinds, "linear")
    is_long = kind == "longrope" or short is not None or long is not None
    _refuse_unread(metadata, is_long or kind == "yarn")
    factor = 1.0 if kind == "none" else _scaling_factor(metadata, 1.0 if is_long else None)
    if freqs is not None and _attention_factor(metadata, 1.0).get("attention_factor", 1.0) != 1:
        raise metadata.error("rope.scaling.attn_factor", "1 beside rope factors")
    if factor != 1 and (is_long or freqs is not None):
        raise ValueError(
            f"{metadata.header.path}: has {factor:g} beside rope factors, as the scale; must be 1"
        )
    if freqs is not None:
        # Llama 3's factors, computed already.
        return {"rope_type": "longrope", "short_factor": freqs, "long_factor": freqs, "attention_factor": 1.0}
    if is_long:
        return {
            "rope_type": "longrope",
            "short_factor": short or long,
            "long_factor": long or short,
            "original_max_position_embeddings": _original_length(metadata),
        } | _attention_factor(metadata, 1.0)
    if kind != "yarn":
        return {"rope_type": "linear", "factor": factor} if factor != 1 else None
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": _original_length(metadata),
        "beta_fast": metadata.positive("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.positive("rope.scaling.yarn_beta_slow", 1.0),
    } | _attention_factor(metadata, 1.0 + 0.1 * math.log(max(factor, 1.0)))


def _refuse_unread(metadata: Metadata, scales_attention: bool) -> None:
    prefix = f"{metadata.architecture}."
    read = ["rope.scale_linear", *(f"rope.scaling.{each}" for each in _SCALING)]
    if scales_attention:
        read += [f"rope.scaling.{each}" for each in _SCALING_OF_ATTENTION]
    for whole, value in metadata.header.metadata.items():
        key = whole.removeprefix(prefix)
        if (
            not key.startswith("rope.scal")
            or key in read
            or (type(value) is float and _NEUTRAL.get(key) == value)
        ):
            continue
        raise metadata.error(key, "absent: it is not supported with this type of scaling")


def _scaling_factor(metadata: Metadata, default: float | None) -> float:
    """Returns 1 if the file says nothing of scaling, or has 0. Old files have the factor under another key, and no
    type."""
    keys = "rope.scaling.factor", "rope.scale_linear"
    for key in keys:
        if metadata.has(key):
            return metadata.positive(key)
    is_said = metadata.has("rope.scaling.type") and not any(map(metadata.is_zero, keys))
    return metadata.positive(keys[0], default) if is_said else 1.0


def _original_length(metadata: Metadata) -> int:
    return metadata.size("rope.scaling.original_context_length", metadata.size("context_length"))


def _attention_factor(metadata: Metadata, by_length: float) -> dict[str, float]:
    """The stored factor is relative to YaRN's."""
    if not metadata.has("rope.scaling.attn_factor"):
        return {}
    return {"attention_factor": metadata.positive("rope.scaling.attn_factor") * by_length}


def _window(metadata: Metadata) -> int | None:
    """The sliding window; None if there is none, which some files write as 0."""
    key = "attention.sliding_window"
    return metadata.size(key) if metadata.has(key) else None


def _llama(metadata: Metadata) -> dict[str, Any]:
    if metadata.has("expert_count"):
        return _common(metadata, "MixtralForCausalLM") | _experts(metadata)
    if window := _window(metadata):
        return _common(metadata, "MistralForCausalLM") | {"sliding_window": window}
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return _common(metadata, "LlamaForCausalLM") | {
        key: name in metadata.tensors for key, name in biases.items()
    }


def _experts(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
    }


def _qwen2(metadata: Metadata) -> dict[str, Any]:
    return _common(metadata, "Qwen2ForCausalLM")


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    return _common(metadata, "Qwen3ForCausalLM") | {"attention_bias": "blk.0.attn_q.bias" in metadata.tensors}


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    return (
        _common(metadata, "Qwen3MoeForCausalLM")
        | _experts(metadata)
        | {"moe_intermediate_size": metadata.size("expert_feed_forward_length"), "norm_topk_prob": True}
    )


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    model = _common(metadata, "Gemma3ForCausalLM")
    # Only the file of 27B, of 62 layers, scales scores by something else than the size of a head.
    is_largest = model["num_hidden_layers"] == 62
    scalar = model["hidden_size"] / model["num_attention_heads"] if is_largest else model["head_dim"]
    capping = "final_logit_softcapping"
    return model | {
        "sliding_window": _window(metadata) or model["max_position_embeddings"],
        "sliding_window_pattern": metadata.size("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": metadata.positive("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": scalar,
        capping: metadata.positive(capping) if metadata.has(capping) else None,
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    model = _common(metadata, "Phi3ForCausalLM") | {"sliding_window": _window(metadata)}
    return model | {"original_max_position_embeddings": _original_length(metadata)}


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    model = _common(metadata, "GptOssForCausalLM", inner="expert_feed_forward_length")
    if model["rope_scaling"] is not None:
        model["rope_scaling"]["truncate"] = False
    return (
        model
        | _experts(metadata)
        | {
            "attention_bias": "blk.0.attn_q.bias" in metadata.tensors,
            "sliding_window": _window(metadata),
        }
    )


ARCHITECTURES: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt-oss": _gpt_oss,
}
