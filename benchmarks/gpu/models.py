"""Models by the names of their presets; with --tiny, tiny models of the same structure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from alignedserve.engine.choices import choose_dtype
from alignedserve.engine.config import EngineConfig
from alignedserve.kv.format import DTYPE_BYTES
from alignedserve.models.config import ModelConfig
from alignedserve.models.presets import PRESETS
from alignedserve.models.source import resolve_model
from benchmarks.gpu.bench import Bench

_TINY = {"vocab_size": 512, "num_hidden_layers": 2, "torch_dtype": "float32"}
_TINY_LLAMA = _TINY | {"hidden_size": 128, "intermediate_size": 192, "rms_norm_eps": 1e-5}
_TINY_WINDOWS = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
_TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def config_of(name: str, bench: Bench) -> ModelConfig:
    return resolve_model(source_of(name, bench), "dummy").config


def source_of(name: str, bench: Bench) -> str:
    """Returns the value for EngineConfig.model."""
    if not bench.options.is_tiny:
        return name
    directory = bench.out / "tiny" / name
    write_config(directory, tiny(PRESETS[name]))
    return str(directory)


def write_config(directory: Path, config: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))


def tiny(real: ModelConfig) -> dict[str, Any]:
    """Returns a config with the real model's family, maximum length, and sharing of KV heads."""
    num_heads = 2
    if real.architecture == "opt":
        return _TINY | {
            "architectures": ["OPTForCausalLM"],
            "hidden_size": 128,
            "ffn_dim": 256,
            "num_attention_heads": num_heads,
            "max_position_embeddings": real.max_position,
        }
    names = {
        "llama": "LlamaForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "gemma3": "Gemma3ForCausalLM",
    }
    more = (_TINY_EXPERTS if real.moe else {}) | (_TINY_WINDOWS if any(real.sliding_windows or ()) else {})
    return (
        _TINY_LLAMA
        | more
        | {
            "architectures": [names[real.architecture]],
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads if real.num_kv_heads == real.num_heads else 1,
            "head_dim": 64,
            "max_position_embeddings": real.max_position,
            "tie_word_embeddings": real.tie_word_embeddings,
        }
    )


def dtype_of(config: ModelConfig, bench: Bench) -> str:
    """Returns the dtype that an engine would use by default."""
    return choose_dtype(EngineConfig(""), config, is_cpu=not bench.is_cuda)


def value_bytes(config: ModelConfig, bench: Bench) -> int:
    return DTYPE_BYTES[dtype_of(config, bench)]
