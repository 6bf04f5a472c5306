"""Llama and its variants, which differ by a switch: Mistral (windows), Qwen2 (qkv bias), Qwen3 (norm of q and k),
Qwen3-MoE and Mixtral (experts), Phi-3 (fused tensors, part of a head rotated)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from alignedserve.models.base import Layers
from alignedserve.models.config import ModelConfig, RopeConfig
from alignedserve.models.mlp import MIXTRAL_NAMES, ExpertNames, Mlp, make_mlp
from alignedserve.models.rope import rope_table
from alignedserve.models.weights import WeightSource
from alignedserve.ops.base import AttentionSpec, Linear, Ops, Projected, Value
from alignedserve.ops.step import StepInputs


@dataclass(frozen=True)
class DecoderLayer:
    input_norm: torch.Tensor
    qkv: Linear
    attention: AttentionSpec
    attention_out: Linear
    mlp_norm: torch.Tensor
    mlp: Mlp


class Llama:
    expert_names = ExpertNames()

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: Ops, max_model_len: int) -> None:
        self.config = config
        self._ops = ops
        layers = Layers(weights, ops)
        rope = rope_table(config.rope or RopeConfig(), config.head_dim, max_model_len).to(ops.device)
        # The largest tensors are taken first, while there is most memory for the copy that is being made.
        self._embedding, self._lm_head = layers.embedding_and_head(
            "model.embed_tokens", config.vocab_size, config.hidden_size, config.tie_word_embeddings
        )
        self._layers = [
            _decoder_layer(config, layers, index, rope, self.expert_names)
            for index in range(config.num_layers)
        ]
        self._final_norm = layers.parameter("model.norm.weight", config.hidden_size)

    def forward(self, step: StepInputs) -> Value:
        x = self._ops.embed(self._embedding, step.token_ids)
        for layer in self._layers:
            x = self._attend(layer, x)
            x = self._mlp(layer, x)
        return x

    def final_states(self, hidden: Value) -> Value:
        return self._ops.rms_norm(hidden, self._final_norm, self.config.norm_eps)

    def logits(self, hidden: Value) -> Value:
        return self._ops.linear(self.final_states(hidden), self._lm_head)

    def _attend(self, layer: DecoderLayer, x: Value) -> Value:
        normed = self._ops.rms_norm(x, layer.input_norm, self.config.norm_eps)
        qkv = self._ops.linear(normed, layer.qkv)
        if layer.attention.outputs_only:
            x = self._ops.outputs(x)
        attended = self._ops.attention(qkv, layer.attention, Projected(normed, layer.qkv))
        return self._ops.linear(attended, layer.attention_out, residual=x)

    def _mlp(self, layer: DecoderLayer, x: Value) -> Value:
        normed = self._ops.rms_norm(x, layer.mlp_norm, self.config.norm_eps)
        return layer.mlp.add_to(x, normed, self._ops)


class Mixtral(Llama):
    expert_names = MIXTRAL_NAMES


def _decoder_layer(
    config: ModelConfig, layers: Layers, index: int, rope: torch.Tensor, names: ExpertNames
) -> DecoderLayer:
    prefix, hidden = f"model.layers.{index}", config.hidden_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norms = [f"{prefix}.self_attn.{q_or_k}_norm.weight" for q_or_k in "qk"] if config.qk_norm else []
    q_norm, k_norm = [layers.parameter(name, config.head_dim) for name in norms] or (None, None)
    return DecoderLayer(
        input_norm=layers.parameter(f"{prefix}.input_layernorm.weight", hidden),
        qkv=_qkv(config, layers, f"{prefix}.self_attn", [q_size, kv_size, kv_size]),
        attention=AttentionSpec(
            layer=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            sliding_window=config.sliding_windows[index] if config.sliding_windows else None,
            rope=rope,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=config.norm_eps,
            outputs_only=index == config.num_layers - 1,
        ),
        attention_out=layers.linear(
            [f"{prefix}.self_attn.o_proj"], [hidden], q_size, bias=config.attention_out_bias
        ),
        mlp_norm=layers.parameter(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp=make_mlp(config, layers, index, names),
    )


def _qkv(config: ModelConfig, layers: Layers, prefix: str, widths: list[int]) -> Linear:
    if config.fused_projections:
        return layers.linear_split(f"{prefix}.qkv_proj", widths, config.hidden_size, config.qkv_bias)
    names = [f"{prefix}.{part}_proj" for part in "qkv"]
    return layers.linear(names, widths, config.hidden_size, config.qkv_bias)
