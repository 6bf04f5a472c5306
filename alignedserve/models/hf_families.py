"""The meaning of each model family's config.json.

Sizes are required. Everything else has the default of transformers, because a config.json may omit values that equal
the default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from alignedserve.models.fields import Fields
from alignedserve.models.hf_gemma import (
    GEMMA3_DEFAULTS,
    gemma3_windows,
    global_fields,
    local_rope,
    refuse_other_gemma,
    text_fields,
)
from alignedserve.models.hf_gpt_oss import GPT_OSS_DEFAULTS, GPT_OSS_ROPE, gpt_oss_moe, gpt_oss_windows
from alignedserve.models.hf_moe import mixture_layers, read_moe
from alignedserve.models.hf_rope import LLAMA_ROPE, PHI3_KINDS, RopeDefaults, longest_sequence, read_rope
from alignedserve.models.hf_windows import listed_windows

# A family returns the arguments of ModelConfig.
Family = Callable[[Fields], dict[str, Any]]

_DTYPES = {prefix + name: name for prefix in ("", "torch.") for name in ("float32", "bfloat16", "float16")}
# Maps to torch's name of the function. gelu_new and gelu_fast are two names of the tanh approximation.
_OPT_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Far beyond any model, and far below what memory could hold.
MAX_LAYERS = 10_000
_GATED_ACTIVATIONS = {"silu": "silu", "swish": "silu"}
_GEMMA_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh_gated"}


def _common(fields: Fields, tie_word_embeddings: bool) -> dict[str, Any]:
    dtype_key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    return {
        "vocab_size": fields.size("vocab_size"),
        "hidden_size": fields.size("hidden_size"),
        "num_layers": fields.size("num_hidden_layers", most=MAX_LAYERS),
        "num_heads": fields.size("num_attention_heads"),
        "dtype": fields.choice(dtype_key, _DTYPES, "float32"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", tie_word_embeddings),
    }


def _token_ids(fields: Fields, bos: int | None, eos: int | None, pad: int | None) -> dict[str, Any]:
    return {
        "bos_token_id": fields.token_id("bos_token_id", bos),
        "eos_token_ids": fields.token_ids("eos_token_id", () if eos is None else (eos,)),
        "pad_token_id": fields.token_id("pad_token_id", pad),
    }


def _gated(
    fields: Fields,
    max_position: int,
    num_kv_heads: int | None,
    norm_eps: float = 1e-6,
    rope: RopeDefaults = LLAMA_ROPE,
) -> dict[str, Any]:
    """Reads the fields that Llama and its relatives share. The arguments are the family's defaults for absent keys."""
    model = _common(fields, tie_word_embeddings=False)
    # Absent and null differ here: null means the number of query heads.
    default_kv_heads = model["num_heads"] if "num_key_value_heads" in fields.values else num_kv_heads
    model["num_kv_heads"] = fields.size("num_key_value_heads", default_kv_heads or model["num_heads"])
    if model["num_heads"] % model["num_kv_heads"]:
        raise ValueError(
            f"{fields.where}: num_key_value_heads is {model['num_kv_heads']}; "
            f"must divide num_attention_heads, which is {model['num_heads']}"
        )
    max_position = fields.size("max_position_embeddings", max_position)
    head_dim = _head_dim(fields, model["hidden_size"], model["num_heads"])
    read = read_rope(fields, max_position, head_dim, rope)
    return model | {
        "intermediate_size": fields.size("intermediate_size"),
        "head_dim": head_dim,
        "max_position": longest_sequence(read, max_position),
        "norm_eps": fields.positive("rms_norm_eps", norm_eps),
        "activation": fields.choice("hidden_act", _GATED_ACTIVATIONS, "silu"),
        "rope": read,
        "sliding_windows": (None,) * model["num_layers"],
    }


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads, which is {num_heads}")
    head_dim = fields.size("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ValueError(f"{fields.where}: head_dim is {head_dim}; must be even for rotary embedding")
    return head_dim


def _window(fields: Fields) -> int | None:
    # Null turns the window off, an absent key does not.
    is_null = "sliding_window" in fields.values and fields.get("sliding_window") is None
    return None if is_null else fields.size("sliding_window", 4096)


def _qwen_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Windows apply only if use_sliding_window is set: in the listed layers, or from layer max_window_layers on."""
    window = _window(fields) if fields.flag("use_sliding_window", False) else None
    types = fields.get("layer_types")
    if types is None:
        first = fields.get("max_window_layers")
        first = 28 if first is None else first
        if type(first) is not int or first < 0:
            raise fields.error("max_window_layers", "an integer of at least 0")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return listed_windows(fields, num_layers, window)


def _llama(fields: Fields) -> dict[str, Any]:
    attention_bias = fields.flag("attention_bias", False)
    return (
        _gated(fields, max_position=2048, num_kv_heads=None)
        | _token_ids(fields, bos=1, eos=2, pad=None)
        | {
            "architecture": "llama",
            "qkv_bias": attention_bias,
            "attention_out_bias": attention_bias,
            "mlp_bias": fields.flag("mlp_bias", False),
        }
    )


def _mistral(fields: Fields) -> dict[str, Any]:
    model = _gated(fields, max_position=131072, num_kv_heads=8) | _token_ids(fields, bos=1, eos=2, pad=None)
    return model | {"architecture": "mistral", "sliding_windows": (_window(fields),) * model["num_layers"]}


def _ministral(fields: Fields) -> dict[str, Any]:
    model, window = _mistral(fields) | {"architecture": "ministral"}, _window(fields)
    if fields.get("layer_types") is None:
        return model
    return model | {"sliding_windows": listed_windows(fields, model["num_layers"], window)}


def _qwen2(fields: Fields) -> dict[str, Any]:
    model = _gated(fields, max_position=32768, num_kv_heads=32)
    return (
        model
        | _token_ids(fields, bos=None, eos=None, pad=None)
        | {
            "architecture": "qwen2",
            "qkv_bias": True,
            "sliding_windows": _qwen_windows(fields, model["num_layers"]),
        }
    )


def _qwen3(fields: Fields) -> dict[str, Any]:
    # Only Qwen3 does not derive an absent head_dim from hidden_size: it is 128.
    attention_bias = fields.flag("attention_bias", False)
    return _qwen2(fields.over({"head_dim": 128})) | {
        "architecture": "qwen3",
        "qkv_bias": attention_bias,
        "attention_out_bias": attention_bias,
        "qk_norm": True,
    }


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    # Unlike in Qwen3, an absent head_dim is derived from hidden_size.
    attention_bias = fields.flag("attention_bias", False)
    model = _gated(fields, max_position=32768, num_kv_heads=4)
    window = _window(fields) if fields.flag("use_sliding_window", False) else None
    return (
        model
        | _token_ids(fields, bos=None, eos=None, pad=None)
        | {
            "architecture": "qwen3_moe",
            "qkv_bias": attention_bias,
            "attention_out_bias": attention_bias,
            "qk_norm": True,
            "sliding_windows": (window,) * model["num_layers"],
            "moe": read_moe(
                fields,
                fields.size("moe_intermediate_size"),
                fields.flag("norm_topk_prob", False),
                mixture_layers(fields, model["num_layers"]),
                num_experts=128,
                top_k=8,
            ),
        }
    )


def _mixtral(fields: Fields) -> dict[str, Any]:
    model = _gated(fields, max_position=131072, num_kv_heads=8, norm_eps=1e-5, rope=RopeDefaults(theta=1e6))
    # Unlike in Mistral, an absent window means none.
    window = None if fields.get("sliding_window") is None else fields.size("sliding_window")
    layers = (True,) * model["num_layers"]
    moe = read_moe(fields, model["intermediate_size"], True, layers, num_experts=8, top_k=2)
    windows = (window,) * model["num_layers"]
    return (
        model
        | _token_ids(fields, bos=1, eos=2, pad=None)
        | {"architecture": "mixtral", "sliding_windows": windows, "moe": moe}
    )


def _phi3(fields: Fields) -> dict[str, Any]:
    # The original length has its own default, which has priority over a value beside longrope's factors.
    fields = fields.over({"original_max_position_embeddings": 4096})
    rope = RopeDefaults(kinds=PHI3_KINDS, may_be_partial=True)
    model = _gated(fields, max_position=4096, num_kv_heads=None, norm_eps=1e-5, rope=rope)
    # As in Mixtral, an absent window means none.
    window = None if fields.get("sliding_window") is None else fields.size("sliding_window")
    return (
        model
        | _token_ids(fields, bos=1, eos=32000, pad=32000)
        | {
            "architecture": "phi3",
            "fused_projections": True,
            "sliding_windows": (window,) * model["num_layers"],
        }
    )


def _gemma3(fields: Fields) -> dict[str, Any]:
    fields = refuse_other_gemma(fields.over(GEMMA3_DEFAULTS))
    model = _gated(global_fields(fields), max_position=131072, num_kv_heads=4, rope=RopeDefaults(theta=1e6))
    attention_bias = fields.flag("attention_bias", False)
    return (
        model
        | _token_ids(fields, bos=2, eos=1, pad=0)
        | {
            "architecture": "gemma3",
            "activation": fields.choice("hidden_activation", _GEMMA_ACTIVATIONS, "gelu_pytorch_tanh"),
            "qkv_bias": attention_bias,
            "attention_out_bias": attention_bias,
            "qk_norm": True,
            "sliding_windows": gemma3_windows(fields, model["num_layers"]),
            "local_rope": local_rope(fields, model["max_position"], model["head_dim"]),
            "norm_offset": 1.0,
            "post_norms": True,
            "embedding_scale": model["hidden_size"] ** 0.5,
            "query_pre_attn_scalar": fields.positive("query_pre_attn_scalar", 256),
        }
    )


def _gemma3_with_vision(fields: Fields) -> dict[str, Any]:
    return _gemma3(text_fields(fields))


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    fields = fields.over(GPT_OSS_DEFAULTS)
    model = _gated(fields, max_position=131072, num_kv_heads=8, norm_eps=1e-5, rope=GPT_OSS_ROPE)
    attention_bias, num_layers = fields.flag("attention_bias", True), model["num_layers"]
    return (
        model
        | _token_ids(fields, bos=None, eos=None, pad=None)
        | {
            "architecture": "gpt_oss",
            "qkv_bias": attention_bias,
            "attention_out_bias": attention_bias,
            "attention_sinks": True,
            "sliding_windows": gpt_oss_windows(fields, num_layers),
            "moe": gpt_oss_moe(fields, model["intermediate_size"], num_layers),
        }
    )


def _opt(fields: Fields) -> dict[str, Any]:
    model = _common(fields, tie_word_embeddings=True) | _token_ids(fields, bos=2, eos=2, pad=1)
    hidden_size, num_heads = model["hidden_size"], model["num_heads"]
    if hidden_size % num_heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads, which is {num_heads}")
    norm_before, bias = fields.flag("do_layer_norm_before", True), fields.flag("enable_bias", True)
    return model | {
        "architecture": "opt",
        "intermediate_size": fields.size("ffn_dim"),
        "num_kv_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "max_position": fields.size("max_position_embeddings", 2048),
        "norm_eps": 1e-5,
        "activation": fields.choice("activation_function", _OPT_ACTIVATIONS, "relu"),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "sliding_windows": (None,) * model["num_layers"],
        "norm_before": norm_before,
        "final_norm": norm_before and not fields.flag("_remove_final_layer_norm", False),
        "norm_affine": fields.flag("layer_norm_elementwise_affine", True),
        "embedding_dim": fields.size("word_embed_proj_dim", hidden_size),
    }


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MinistralForCausalLM": _ministral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "Phi3ForCausalLM": _phi3,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_with_vision,
    "GptOssForCausalLM": _gpt_oss,
    "OPTForCausalLM": _opt,
}
