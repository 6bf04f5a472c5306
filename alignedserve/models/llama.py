"""Llama and its variants:

- Mistral: windows
- Qwen2: qkv bias
- Qwen3: norm of q and k
- Qwen3-MoE and Mixtral: experts
- Phi-3: fused tensors, a part of each head rotated
- Gemma 3: norms after each part, too
- gpt-oss: sinks, experts with biases in one tensor
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from alignedserve.models.base import Layers, PostNorm, add_linear
from alignedserve.models.config import ModelConfig, RopeConfig
from alignedserve.models.mlp import GPT_OSS_NAMES, MIXTRAL_NAMES, ExpertNames, Mlp, make_mlp
from alignedserve.models.rope import rope_table
from alignedserve.models.weights import WeightSource
from alignedserve.ops.base import AttentionSpec, Linear, Ops, Projected, Value
from alignedserve.ops.shard import RankPart
from alignedserve.ops.step import StepInputs


@dataclass(frozen=True)
class LlamaLayer:
    input_norm: torch.Tensor
    qkv: Linear
    attention: AttentionSpec
    attention_out: Linear
    mlp_norm: torch.Tensor
    mlp: Mlp
    attention_post_norm: PostNorm | None = None


class Llama:
    expert_names = ExpertNames()

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: Ops, max_model_len: int) -> None:
        self.config = config
        self._ops = ops
        layers = Layers(weights, ops)
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=ops.dtype).item()
        ropes = _Ropes.of(config, max_model_len, ops.device)
        # The largest tensors come first, while most memory is left for the copy.
        self._embedding, self._lm_head = layers.embedding_and_head(
            "model.embed_tokens", config.vocab_size, config.hidden_size, config.tie_word_embeddings
        )
        self._layers = [
            _decoder_layer(config, layers, index, ropes, self.expert_names)
            for index in range(config.num_layers)
        ]
        self._final_norm = layers.norm("model.norm.weight", config.hidden_size, config.norm_offset)

    def forward(self, step: StepInputs) -> Value:
        x = self._ops.embed(self._embedding, step.token_ids, scale=self._embedding_scale)
        for layer in self._layers:
            x = self._attend(layer, x)
            x = self._mlp(layer, x)
        return x

    def final_states(self, hidden: Value) -> Value:
        return self._ops.rms_norm(hidden, self._final_norm, self.config.norm_eps)

    def logits(self, hidden: Value) -> Value:
        return self._ops.linear(self.final_states(hidden), self._lm_head)

    def _attend(self, layer: LlamaLayer, x: Value) -> Value:
        normed = self._ops.rms_norm(x, layer.input_norm, self.config.norm_eps)
        qkv = self._ops.linear(normed, layer.qkv)
        if layer.attention.outputs_only:
            x = self._ops.outputs(x)
        attended = self._ops.attention(qkv, layer.attention, Projected(normed, layer.qkv))
        return add_linear(self._ops, attended, layer.attention_out, x, layer.attention_post_norm)

    def _mlp(self, layer: LlamaLayer, x: Value) -> Value:
        normed = self._ops.rms_norm(x, layer.mlp_norm, self.config.norm_eps)
        return layer.mlp.add_to(x, normed, self._ops)


class Mixtral(Llama):
    expert_names = MIXTRAL_NAMES


class GptOss(Llama):
    expert_names = GPT_OSS_NAMES


@dataclass(frozen=True)
class _Ropes:
    """The rope tables of full layers and of sliding ones."""

    everywhere: torch.Tensor
    local: torch.Tensor

    @classmethod
    def of(cls, config: ModelConfig, max_len: int, device: torch.device) -> _Ropes:
        table = rope_table(config.rope or RopeConfig(), config.head_dim, max_len).to(device)
        if config.local_rope is None:
            return cls(table, table)
        return cls(table, rope_table(config.local_rope, config.head_dim, max_len).to(device))


def _decoder_layer(
    config: ModelConfig, layers: Layers, index: int, ropes: _Ropes, names: ExpertNames
) -> LlamaLayer:
    prefix, hidden = f"model.layers.{index}", config.hidden_size

    def norm(name: str, width: int = hidden) -> torch.Tensor:
        return layers.norm(f"{prefix}.{name}.weight", width, config.norm_offset)

    def post_norm(name: str) -> PostNorm | None:
        return PostNorm(norm(name), config.norm_eps) if config.post_norms else None

    return LlamaLayer(
        input_norm=norm("input_layernorm"),
        qkv=_qkv(config, layers, f"{prefix}.self_attn"),
        attention=_attention(config, layers, index, ropes, norm),
        attention_out=layers.linear(
            [f"{prefix}.self_attn.o_proj"],
            [hidden],
            config.num_heads * config.head_dim,
            bias=config.attention_out_bias,
            mine=RankPart(inputs=layers.shard.part(config.num_heads, config.head_dim)),
        ),
        # Llama's norm before the MLP has the name of Gemma's norm after attention.
        attention_post_norm=post_norm("post_attention_layernorm"),
        mlp_norm=norm("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"),
        mlp=make_mlp(config, layers, index, names, post_norm("post_feedforward_layernorm")),
    )


def _attention(
    config: ModelConfig, layers: Layers, index: int, ropes: _Ropes, norm: Callable[[str, int], torch.Tensor]
) -> AttentionSpec:
    window = config.sliding_windows[index] if config.sliding_windows else None
    shard = layers.shard
    return AttentionSpec(
        layer=index,
        num_heads=shard.num(config.num_heads),
        num_kv_heads=shard.num(config.num_kv_heads),
        head_dim=config.head_dim,
        scale=(config.query_pre_attn_scalar or config.head_dim) ** -0.5,
        sliding_window=window,
        rope=ropes.everywhere if window is None else ropes.local,
        q_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
        norm_eps=config.norm_eps,
        sinks=_sinks(config, layers, index) if config.attention_sinks else None,
        outputs_only=index == config.num_layers - 1,
    )


def _sinks(config: ModelConfig, layers: Layers, index: int) -> torch.Tensor:
    mine = layers.shard.part(config.num_heads)
    return layers.parameter(f"model.layers.{index}.self_attn.sinks", config.num_heads, some=mine)


def _qkv(config: ModelConfig, layers: Layers, prefix: str) -> Linear:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    widths, hidden = [q_size, kv_size, kv_size], config.hidden_size
    kv_part = layers.shard.part(config.num_kv_heads, config.head_dim)
    mine = RankPart(outputs=[layers.shard.part(config.num_heads, config.head_dim), kv_part, kv_part])
    if config.fused_projections:
        return layers.linear_split(f"{prefix}.qkv_proj", widths, hidden, config.qkv_bias, mine=mine)
    names = [f"{prefix}.{part}_proj" for part in "qkv"]
    return layers.linear(names, widths, hidden, config.qkv_bias, mine=mine)
