"""GGUF files made of Hugging Face directories, with the names, keys and order of rows of llama.cpp's converter."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Quantisation
from safetensors.torch import load_file

Array = np.ndarray[Any, Any]
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "GptOssForCausalLM": "gpt-oss",
}
# Experts of a layer, each with its own tensors, and the layer of all in the file.
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_PARTS = dict(gate_proj="gate", w1="gate", up_proj="up", w3="up", down_proj="down", w2="down")


def as_published(directory: Path, copy: Path) -> Path:
    """Copies the directory. Its configuration becomes one that GGUF can express."""
    shutil.copytree(directory, copy)
    path = copy / "config.json"
    config = json.loads(path.read_text())
    if config["model_type"] == "gemma3_text":
        config |= {
            "query_pre_attn_scalar": config["head_dim"],
            "sliding_window_pattern": 2,
            "layer_types": None,
        }
    if config["model_type"] == "gpt_oss":
        config |= {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
    path.write_text(json.dumps(config))
    return copy


def write_gguf(
    directory: Path,
    path: Path,
    quantise: str | None = None,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    num_files: int = 1,
) -> Path:
    """Writes the model of the directory, whose weights are in float32. `quantise`: the type of matrices whose rows are
    whole blocks. Returns the path of the first file."""
    config = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    tensors = dict(_tensors(config, architecture, load_file(directory / "model.safetensors")))
    most = -(-len(tensors) // num_files) if num_files > 1 else 0
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=most)
    _write_config(writer, config)
    for name, tensor in tensors.items():
        kind = Quantisation[quantise or "F32"]
        is_coded = tensor.ndim > 1 and tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        # Published files have no embedding in MXFP4 either.
        is_left = "inp" in name or (name.startswith("token_embd") and quantise == "MXFP4")
        if quantise and is_coded and not is_left:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    if change:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if num_files == 1 else path.with_name(f"{path.stem}-00001-of-{num_files:05}.gguf")


def _tensors(
    config: Mapping[str, Any], architecture: str, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, Array]]:
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    stacked: dict[str, dict[int, Array]] = {}
    for name, tensor in tensors.items():
        values = tensor.numpy()
        if found := _EXPERT.fullmatch(name):
            layer, number, part = found.groups()
            stacked.setdefault(f"blk.{layer}.ffn_{_PARTS[part]}_exps.weight", {})[int(number)] = values
        elif ".experts." in name:
            yield from _of_gpt_oss(name, values)
        else:
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if name.endswith(".sinks"):
                stored = f"{names.get_name(name)}.weight"
            assert stored, name
            yield stored, _as_stored(config, architecture, name, values)
    for stored, of_experts in stacked.items():
        yield stored, np.stack([of_experts[number] for number in sorted(of_experts)])
    yield from _factors(config)


def _as_stored(config: Mapping[str, Any], architecture: str, name: str, values: Array) -> Array:
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return values + 1
    for part, key in ("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads"):
        if architecture == "llama" and f".{part}." in name:
            halves = values.reshape(config[key], 2, -1, *values.shape[1:])
            return halves.swapaxes(1, 2).reshape(values.shape)
    return values


def _of_gpt_oss(name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """Its weights are [expert, in, out]; gates and ups alternate."""
    layer, part = name.split(".")[2], name.rpartition(".")[2]
    kind = "bias" if part.endswith("_bias") else "weight"
    of_outputs = values if kind == "bias" else values.swapaxes(1, 2)
    each = {"down": of_outputs}
    if part.startswith("gate_up"):
        each = {"gate": of_outputs[:, ::2], "up": of_outputs[:, 1::2]}
    for which, found in each.items():
        yield f"blk.{layer}.ffn_{which}_exps.{kind}", np.ascontiguousarray(found)


def _factors(config: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        for which in "long", "short":
            yield f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], dtype=np.float32)
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(config, rope)


def _llama3_factors(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Array:
    head_dim = config["head_dim"]
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (index / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        smooth = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def _write_config(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1)))
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if pattern := config.get("sliding_window_pattern"):
        writer.add_uint32(f"{writer.arch}.attention.sliding_window_pattern", pattern)
    if config.get("sliding_window") is not None:
        writer.add_sliding_window(config["sliding_window"])
    if num_experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(
            config.get("moe_intermediate_size", config["intermediate_size"])
        )
    if rope.get("rope_type") in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if original := config.get("original_max_position_embeddings"):
        writer.add_rope_scaling_orig_ctx_len(original)
