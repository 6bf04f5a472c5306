"""transformers' own config classes are the reference: our result for a dict must equal theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from alignedserve.models.config import ModelConfig, MoeConfig, RopeConfig
from alignedserve.models.hf_config import load_model_config, model_config_from_dict

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    # It is read of mixtures only.
    "moe_intermediate_size": 80,
}
OPT_SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
GATED = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "ministral": transformers.MinistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "mixtral": transformers.MixtralConfig,
    "phi3": transformers.Phi3Config,
    "gpt_oss": transformers.GptOssConfig,
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "opt": "OPTForCausalLM",
}


def ours(family: str, values: dict[str, Any]) -> ModelConfig:
    return model_config_from_dict({"architectures": [ARCHITECTURES[family]], **values})


def as_ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def check_gated(family: str, values: dict[str, Any]) -> ModelConfig:
    config = ours(family, values)
    oracle = GATED[family](**json.loads(json.dumps(values)))
    rope = oracle.rope_parameters
    assert config.rope is not None
    assert (config.rope.theta, config.rope.kind) == (rope["rope_theta"], rope["rope_type"])
    assert config.rope.factor == rope.get("factor", 1.0)
    if rope["rope_type"] == "llama3":
        assert config.rope.low_freq_factor == rope["low_freq_factor"]
        assert config.rope.high_freq_factor == rope["high_freq_factor"]
        assert config.rope.original_max_position == rope["original_max_position_embeddings"]
    assert config.architecture == family
    assert config.num_kv_heads == oracle.num_key_value_heads
    # the modelling code of all of them reads the head size this way
    head_dim = getattr(oracle, "head_dim", None) or oracle.hidden_size // oracle.num_attention_heads
    assert config.head_dim == head_dim
    # YaRN's factor counts from the original length: transformers does not look at how long sequences get.
    longest = rope["factor"] * rope["original_max_position_embeddings"] if config.rope.kind == "yarn" else 0
    assert config.max_position == max(oracle.max_position_embeddings, longest)
    assert config.norm_eps == oracle.rms_norm_eps
    assert config.activation == oracle.hidden_act
    assert config.tie_word_embeddings == oracle.tie_word_embeddings
    assert config.bos_token_id == oracle.bos_token_id
    assert config.eos_token_ids == as_ids(oracle.eos_token_id)
    assert config.pad_token_id == oracle.pad_token_id
    assert config.sliding_windows == oracle_windows(oracle)
    return config


def oracle_windows(oracle: Any) -> tuple[int | None, ...]:
    layer_types = getattr(oracle, "layer_types", None)
    window: int | None = getattr(oracle, "sliding_window", None)
    if layer_types is None:
        return (window,) * int(oracle.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


@pytest.mark.parametrize("family", GATED)
def test_defaults_are_those_of_transformers(family: str) -> None:
    check_gated(family, SIZES)


@pytest.mark.parametrize("family", GATED)
@pytest.mark.parametrize(
    "values",
    [
        {"head_dim": 16, "rms_norm_eps": 1e-5},
        {"num_key_value_heads": 8, "tie_word_embeddings": True, "max_position_embeddings": 4096},
        {"rope_theta": 500000.0, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 1234.5, "rope_type": "default"}},
        {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 1234.5}},
        {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 8},
        {"eos_token_id": None, "bos_token_id": None},
    ],
)
def test_values_are_read_as_transformers_reads_them(family: str, values: dict[str, Any]) -> None:
    check_gated(family, SIZES | values)


@pytest.mark.parametrize("family", sorted(set(GATED) - {"phi3"}))
@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4}, "rope_parameters": {"rope_theta": 9.0}},
    ],
)
def test_scalings_are_read_as_transformers_reads_them(family: str, values: dict[str, Any]) -> None:
    check_gated(family, SIZES | values)


@pytest.mark.parametrize("window", [{}, {"sliding_window": None}, {"sliding_window": 17}])
def test_phi3_windows_and_fused_tensors(window: dict[str, Any]) -> None:
    assert check_gated("phi3", SIZES | window).fused_projections


def test_phi3_rotates_a_part_of_a_head() -> None:
    sizes = SIZES | {"head_dim": 16, "partial_rotary_factor": 0.75}
    rope = check_gated("phi3", sizes).rope
    assert rope is not None and rope.partial_rotary_factor == 0.75
    for factor in (0.7, 1.25, 0.01):
        with pytest.raises(
            ValueError, match=f"partial_rotary_factor is {factor}; must be .* head_dim, which is 16"
        ):
            ours("phi3", sizes | {"partial_rotary_factor": factor})


def test_yarn_lengthens_the_sequences_that_a_model_takes() -> None:
    """Users add it to a file whose max_position_embeddings is the length at first."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for found, longest in ((32768, 131072), (40960, 131072), (262144, 262144)):
        assert (
            ours("qwen2", SIZES | {"max_position_embeddings": found, "rope_scaling": yarn}).max_position
            == longest
        )


def check_gemma3(values: dict[str, Any]) -> ModelConfig:
    config = model_config_from_dict({"architectures": ["Gemma3ForCausalLM"], **values})
    oracle = transformers.Gemma3TextConfig(**json.loads(json.dumps(values)))
    for kind, rope in (("full_attention", config.rope), ("sliding_attention", config.local_rope)):
        assert oracle.rope_parameters is not None
        expected = oracle.rope_parameters[kind]
        assert rope is not None
        assert (rope.theta, rope.kind) == (expected["rope_theta"], expected["rope_type"])
        assert rope.factor == expected.get("factor", 1.0)
    assert (config.vocab_size, config.hidden_size) == (oracle.vocab_size, oracle.hidden_size)
    assert config.intermediate_size == oracle.intermediate_size
    assert config.num_layers == oracle.num_hidden_layers
    assert (config.num_heads, config.num_kv_heads) == (oracle.num_attention_heads, oracle.num_key_value_heads)
    assert config.head_dim == oracle.head_dim
    assert config.max_position == oracle.max_position_embeddings
    assert config.norm_eps == oracle.rms_norm_eps
    assert config.activation == "gelu_tanh_gated" and oracle.hidden_activation == "gelu_pytorch_tanh"
    assert config.tie_word_embeddings == oracle.tie_word_embeddings
    assert config.qkv_bias == config.attention_out_bias == oracle.attention_bias
    assert config.query_pre_attn_scalar == oracle.query_pre_attn_scalar
    assert config.sliding_windows == oracle_windows(oracle)
    assert config.embedding_scale == oracle.hidden_size**0.5
    assert config.bos_token_id == oracle.bos_token_id
    assert config.eos_token_ids == as_ids(oracle.eos_token_id)
    assert config.pad_token_id == oracle.pad_token_id
    assert config.qk_norm and config.post_norms and config.norm_offset == 1.0
    return config


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024},
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 500},
        {"sliding_window_pattern": 3, "num_hidden_layers": 7},
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "num_hidden_layers": 4},
        {
            "rope_theta": 5e5,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        {"rope_scaling": None, "query_pre_attn_scalar": 168, "attention_bias": True},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 123.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 45.0},
            }
        },
        {
            "rope_parameters": {"full_attention": {"rope_theta": 123.0}, "sliding_attention": None},
            "rope_scaling": {"factor": 2.0, "rope_type": "linear"},
            "rope_theta": 77.0,
        },
        {"hidden_act": "gelu_pytorch_tanh", "eos_token_id": [1, 106], "tie_word_embeddings": False},
    ],
)
def test_gemma3(values: dict[str, Any]) -> None:
    check_gemma3(values)


def test_a_gemma3_that_sees_is_its_text_part() -> None:
    text = {"hidden_size": 512, "num_hidden_layers": 4, "sliding_window": 64, "eos_token_id": 9}
    values = {"text_config": text, "vision_config": {}, "torch_dtype": "bfloat16", "eos_token_id": [1, 106]}
    config = model_config_from_dict({"architectures": ["Gemma3ForConditionalGeneration"], **values})
    assert config == model_config_from_dict({"model_type": "gemma3", **values})
    assert config == model_config_from_dict(
        {"model_type": "gemma3_text", **text, "torch_dtype": "bfloat16", "eos_token_id": [1, 106]}
    )


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping is 30.0", "null"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping is 50.0", "null"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention is True", "false"]),
        ({"hidden_activation": "silu"}, ["hidden_activation is 'silu'", "gelu_pytorch_tanh"]),
        ({"rope_local_base_freq": 0}, ["rope_local_base_freq is 0", "positive number"]),
        ({"query_pre_attn_scalar": "x"}, ["query_pre_attn_scalar is 'x'", "positive number"]),
        ({"sliding_window_pattern": 0}, ["sliding_window_pattern is 0", "positive integer"]),
        ({"layer_types": ["sliding_attention"]}, ["layer_types", "a list of 26 entries"]),
        ({"rope_scaling": 3}, ["rope_scaling is 3", "an object"]),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": None},
            ["text_config is missing", "an object"],
        ),
    ],
)
def test_other_gemmas_are_refused_by_name(values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        model_config_from_dict({"architectures": ["Gemma3ForCausalLM"], **values})
    assert all(part in str(error.value) for part in parts)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_null_key_value_heads_means_one_per_query_head(family: str) -> None:
    config = check_gated(family, SIZES | {"num_attention_heads": 16, "num_key_value_heads": None})
    assert config.num_kv_heads == 16


def test_llama3_scaling_without_its_length_takes_the_models() -> None:
    rope = {key: value for key, value in LLAMA3_ROPE.items() if not key.startswith("original")}
    values = SIZES | {"max_position_embeddings": 777, "rope_scaling": {"rope_type": "llama3", **rope}}
    config = check_gated("llama", values)
    assert config.rope is not None and config.rope.original_max_position == 777


@pytest.mark.parametrize("window", [{}, {"sliding_window": None}, {"sliding_window": 17}])
def test_mistral_windows(window: dict[str, Any]) -> None:
    check_gated("mistral", SIZES | window)


@pytest.mark.parametrize(
    "values",
    [
        {"sliding_window": None},
        {"sliding_window": 17},
        {"sliding_window": 17, "layer_types": ["full_attention", *["sliding_attention"] * 3]},
        {"layer_types": ["full_attention"] * 4},
    ],
)
def test_ministral_windows(values: dict[str, Any]) -> None:
    check_gated("ministral", SIZES | values)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "values",
    [
        {"sliding_window": 17},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {
            "use_sliding_window": True,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ],
)
def test_qwen_windows(family: str, values: dict[str, Any]) -> None:
    check_gated(family, SIZES | values)


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({}, (True,) * 4),
        ({"num_experts": 16, "num_experts_per_tok": 5, "norm_topk_prob": True}, (True,) * 4),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
        ({"mlp_only_layers": None, "decoder_sparse_step": 3}, (False, False, True, False)),
        ({"use_sliding_window": True, "sliding_window": 17}, (True,) * 4),
    ],
)
def test_qwen3_moe(values: dict[str, Any], layers: tuple[bool, ...]) -> None:
    config = check_gated("qwen3_moe", SIZES | values)
    oracle = transformers.Qwen3MoeConfig(**SIZES | values)
    assert config.moe == MoeConfig(
        num_experts=oracle.num_experts,
        top_k=oracle.num_experts_per_tok,
        intermediate_size=80,
        normalises=oracle.norm_topk_prob,
        layers=layers,
    )
    assert config.qk_norm and config.intermediate_size == 320


@pytest.mark.parametrize(
    "values",
    [{}, {"num_local_experts": 4, "num_experts_per_tok": 3}, {"sliding_window": 17}, {"head_dim": 4}],
)
def test_mixtral(values: dict[str, Any]) -> None:
    config = check_gated("mixtral", SIZES | values)
    oracle = transformers.MixtralConfig(**SIZES | values)
    assert config.moe == MoeConfig(
        oracle.num_local_experts, oracle.num_experts_per_tok, 320, normalises=True, layers=(True,) * 4
    )


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"sliding_window": 17, "layer_types": ["full_attention", "sliding_attention"] * 2},
        {"attention_bias": False, "num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16},
        {"swiglu_alpha": 2.0, "swiglu_limit": 3.0},
    ],
)
def test_gpt_oss(values: dict[str, Any]) -> None:
    config = check_gated("gpt_oss", SIZES | values)
    oracle = transformers.GptOssConfig(**SIZES | values)
    assert config.moe == MoeConfig(
        oracle.num_local_experts,
        oracle.num_experts_per_tok,
        320,
        normalises=True,
        layers=(True,) * 4,
        is_stacked=True,
        clamped_swiglu=(oracle.swiglu_alpha, oracle.swiglu_limit),
    )
    assert config.attention_sinks
    assert config.qkv_bias == config.attention_out_bias == oracle.attention_bias


# As OpenAI published it, but for the layers, of which there are two here.
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_the_published_file_of_gpt_oss() -> None:
    config = model_config_from_dict(GPT_OSS_20B)
    assert config.rope == RopeConfig(
        theta=150000.0,
        kind="yarn",
        factor=32.0,
        original_max_position=4096,
        truncate=False,
        attention_factor=config.rope.attention_factor if config.rope else 0.0,
    )
    assert config.rope.attention_factor == pytest.approx(1.3465735902799727)
    assert config.sliding_windows == (128, None) and config.max_position == 131072
    assert config.quantised is not None and config.quantised.kind == "mxfp4"
    assert config.quantised.has("model.layers.1.mlp.experts.gate_up_proj")
    others = ("self_attn.q_proj", "mlp.router")
    assert not any(config.quantised.has(f"model.layers.1.{name}") for name in others)
    # It may be another's words for the same: a layer may be left out.
    only_one = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.0.mlp"]}
    config = model_config_from_dict(GPT_OSS_20B | {"quantization_config": only_one})
    assert config.quantised is not None
    assert not config.quantised.has("model.layers.0.mlp.experts.down_proj")
    assert config.quantised.has("model.layers.10.mlp.experts.down_proj")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types is .*; must be a list of 2 entries"),
        ({"swiglu_limit": 0}, "swiglu_limit is 0; must be a positive number"),
        (
            {"num_experts_per_tok": 33},
            "num_experts_per_tok is 33; must be at most num_local_experts, which is 32",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
            "quant_method is 'gptq'; must be mxfp4 for gpt_oss",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "sliding_window": None, "layer_types": None},
            "quant_method is 'mxfp4'; must be another for mixtral",
        ),
        (
            {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["("]}},
            "modules_to_not_convert is .*; must be regular expressions",
        ),
    ],
)
def test_what_gpt_oss_can_not_be_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        model_config_from_dict(GPT_OSS_20B | {"rope_scaling": None} | values)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (
            {"num_experts": 4, "num_experts_per_tok": 5},
            ["num_experts_per_tok", "5", "num_experts, which is 4"],
        ),
        ({"num_experts": 0}, ["num_experts", "0", "positive integer"]),
        ({"num_experts": 5000}, ["num_experts", "5000", "at most 1024"]),
        ({"mlp_only_layers": 3}, ["mlp_only_layers", "3", "a list of layers"]),
        ({"mlp_only_layers": [-1]}, ["mlp_only_layers", "-1", "a list of layers"]),
        ({"decoder_sparse_step": 0}, ["decoder_sparse_step", "0", "positive integer"]),
        ({"moe_intermediate_size": None}, ["moe_intermediate_size is missing"]),
    ],
)
def test_bad_mixtures_are_named(values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        ours("qwen3_moe", SIZES | values)
    assert all(part in str(error.value) for part in parts)


def test_biases() -> None:
    def biases(family: str, **values: Any) -> tuple[bool, bool, bool, bool]:
        config = ours(family, SIZES | values)
        return config.qkv_bias, config.attention_out_bias, config.mlp_bias, config.qk_norm

    assert biases("llama") == (False, False, False, False)
    assert biases("llama", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert biases("mistral", attention_bias=True) == (False, False, False, False)
    assert biases("qwen2") == (True, False, False, False)
    assert biases("qwen3") == (False, False, False, True)
    assert biases("qwen3", attention_bias=True) == (True, True, False, True)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
        {"_remove_final_layer_norm": True, "enable_bias": False, "layer_norm_elementwise_affine": False},
        {"tie_word_embeddings": False, "max_position_embeddings": 99, "eos_token_id": [3, 4]},
    ],
)
def test_opt(values: dict[str, Any]) -> None:
    config = ours("opt", OPT_SIZES | values)
    oracle = transformers.OPTConfig(**OPT_SIZES | values)
    assert config.intermediate_size == oracle.ffn_dim
    assert config.norm_before == oracle.do_layer_norm_before
    assert config.final_norm == (oracle.do_layer_norm_before and not oracle._remove_final_layer_norm)
    assert config.norm_affine == oracle.layer_norm_elementwise_affine
    assert config.embedding_dim == oracle.word_embed_proj_dim
    assert (config.qkv_bias, config.attention_out_bias, config.mlp_bias) == (oracle.enable_bias,) * 3
    assert config.tie_word_embeddings == oracle.tie_word_embeddings
    assert (config.max_position, config.activation) == (oracle.max_position_embeddings, "relu")
    assert (config.bos_token_id, config.pad_token_id) == (oracle.bos_token_id, oracle.pad_token_id)
    assert config.eos_token_ids == as_ids(oracle.eos_token_id)
    assert config.rope is None and config.norm_eps == 1e-5


def test_opt_gelu_names() -> None:
    names = ["relu", "gelu", "gelu_new", "gelu_pytorch_tanh"]
    read = [ours("opt", OPT_SIZES | {"activation_function": name}).activation for name in names]
    assert read == ["relu", "gelu", "gelu_tanh", "gelu_tanh"]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ({}, "float32"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
    ],
)
def test_dtype(values: dict[str, Any], dtype: str) -> None:
    assert ours("llama", SIZES | values).dtype == dtype


def test_model_type_stands_in_for_architectures() -> None:
    assert model_config_from_dict({"model_type": "qwen2", **SIZES}).architecture == "qwen2"


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_what_transformers_writes_is_read(family: str, tmp_path: Path) -> None:
    classes = {**GATED, "opt": transformers.OPTConfig}
    oracle = classes[family](**(OPT_SIZES if family == "opt" else SIZES), dtype="bfloat16")
    oracle.architectures = [ARCHITECTURES[family]]
    oracle.save_pretrained(tmp_path)
    expected = ours(family, (OPT_SIZES if family == "opt" else SIZES) | {"dtype": "bfloat16"})
    assert load_model_config(tmp_path) == expected


@pytest.mark.parametrize(("in_generation", "expected"), [(9, (2, 9)), ([9, 2, 10], (2, 9, 10)), (None, (2,))])
def test_end_tokens_of_generation_config_are_merged(
    tmp_path: Path, in_generation: Any, expected: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **SIZES}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    assert load_model_config(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2LMHeadModel", "Qwen3ForCausalLM"]),
        ({"architectures": None, "model_type": "gpt2"}, ["gpt2", "LlamaForCausalLM"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["rope_scaling", "factor is missing", "a positive number"]),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}},
            ["rope_scaling", "beta_fast is 1", "greater than beta_slow, which is 2"],
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1},
            ["rope_theta", "greater than 1"],
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 1e9}},
            ["factor is 1000000000.0", "at most", "2048"],
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["rope_scaling", "dynamic", "llama3"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["short_factor is missing", "4 positive numbers"]),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1, 1, 1, 0], "long_factor": [1] * 4}},
            ["short_factor is [1, 1, 1, 0]", "4 positive numbers"],
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling", "factor is missing", "positive number"]),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE, "high_freq_factor": 0.5}},
            ["high_freq_factor", "0.5", "greater than low_freq_factor"],
        ),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "1.0"]),
        ({"rope_theta": -1}, ["rope_theta", "-1", "positive number"]),
        ({"hidden_size": None}, ["hidden_size is missing", "positive integer"]),
        ({"hidden_size": -4}, ["hidden_size", "-4", "positive integer"]),
        ({"vocab_size": "many"}, ["vocab_size", "'many'", "positive integer"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0", "positive integer"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True", "positive integer"]),
        ({"num_hidden_layers": 10**6}, ["num_hidden_layers", "1000000", "at most 10000"]),
        ({"max_position_embeddings": 2**31}, ["max_position_embeddings", str(2**31), str(2**31 - 1)]),
        ({"architectures": [["LlamaForCausalLM"]]}, ["architectures", "[['LlamaForCausalLM']]"]),
        ({"hidden_size": 250}, ["hidden_size", "250", "multiple of num_attention_heads, which is 32"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "divide num_attention_heads", "32"]),
        ({"head_dim": 7}, ["head_dim", "7", "even"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps", "0", "positive number"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"torch_dtype": "int8"}, ["torch_dtype", "int8", "bfloat16"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes", "true or false"]),
        ({"eos_token_id": ["</s>"]}, ["eos_token_id", "</s>", "token id"]),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            ["quantization_config", "hqq", "awq, compressed-tensors"],
        ),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], parts: list[str]) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **SIZES, **values}
    with pytest.raises(ValueError) as error:
        model_config_from_dict(config, where="/some/config.json")
    for part in ["/some/config.json", *parts]:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"layer_types": ["full_attention"]}, ["layer_types", "4 entries"]),
        ({"layer_types": ["sliding_attention"] * 4}, ["layer_types", "sliding_window is None"]),
        (
            {"use_sliding_window": True, "layer_types": ["linear_attention"] * 4},
            ["linear_attention", "full_attention or sliding_attention"],
        ),
        ({"max_window_layers": -1}, ["max_window_layers", "-1", "at least 0"]),
        ({"use_sliding_window": True, "sliding_window": 0}, ["sliding_window", "0", "positive"]),
        (
            {"use_sliding_window": True, "sliding_window": 2**32 + 5},
            ["sliding_window", "4294967301", "positive"],
        ),
    ],
)
def test_bad_windows_are_named(values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        ours("qwen2", SIZES | values)
    assert all(part in str(error.value) for part in parts)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{tmp_path} holds no config\.json"):
        load_model_config(tmp_path)
    for text in ("{", "[" * 100_000, "1" * 5000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
            load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json holds a JSON list; must be an object"):
        load_model_config(tmp_path)


def test_rope_defaults_match_the_record() -> None:
    assert ours("llama", SIZES).rope == RopeConfig(10000.0)
