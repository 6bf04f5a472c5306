"""The Hugging Face name of each tensor of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from alignedserve.models.file_map import TensorEntry

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
# By the names in `architectures` of config.json.
_OF_ARCHITECTURE: dict[str, Mapping[str, str]] = {
    "Gemma3ForCausalLM": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    # Gates come first.
    "Phi3ForCausalLM": {"ffn_up": "mlp.gate_up_proj"},
    "MixtralForCausalLM": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.w1",
        "ffn_up_exps": "block_sparse_moe.experts.w3",
        "ffn_down_exps": "block_sparse_moe.experts.w2",
    },
    "GptOssForCausalLM": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
}
# Inputs of the configuration.
ROPE_FREQS, ROPE_SHORT, ROPE_LONG = (
    f"rope_{what}.weight" for what in ("freqs", "factors_short", "factors_long")
)
CONFIG_TENSORS = (ROPE_FREQS, ROPE_SHORT, ROPE_LONG)
_OF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_name(architecture: str, name: str) -> str:
    """Returns a name without a counterpart unchanged."""
    if found := _OF_LAYER.fullmatch(name):
        index, part, kind = found.groups()
        if part == "attn_sinks":
            return f"model.layers.{index}.self_attn.sinks"
        part = {**_LAYER, **_OF_ARCHITECTURE.get(architecture, {})}.get(part, "")
        return f"model.layers.{index}.{part}.{kind}" if part else name
    part, _, kind = name.rpartition(".")
    return f"{_OUTER[part]}.{kind}" if part in _OUTER else name


def hf_entries(
    architecture: str, tensors: Mapping[str, TensorEntry], num_experts: int
) -> Iterator[tuple[str, TensorEntry]]:
    """Returns the model's tensors by their names. Each expert gets a tensor of its own."""
    for name, entry in tensors.items():
        if name in CONFIG_TENSORS:
            continue
        prefix, experts, part = hf_name(architecture, name).partition(".experts.")
        if not experts:
            yield prefix, entry
            continue
        if len(entry.shape) < 2 or entry.shape[0] != num_experts:
            raise ValueError(f"{name} has shape {entry.shape}; must be of {num_experts} experts")
        # Experts lie one after the other: [expert, out, in].
        size = (entry.end - entry.begin) // num_experts
        for number in range(num_experts):
            begin = entry.begin + number * size
            each = replace(entry, shape=entry.shape[1:], begin=begin, end=begin + size)
            yield f"{prefix}{experts}{number}.{part}", each
