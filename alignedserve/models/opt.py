"""OPT: learned positions, layer norms before (or, in the 350m, after) each part, plain two-layer MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from alignedserve.models.base import Layers
from alignedserve.models.config import ModelConfig
from alignedserve.models.weights import WeightSource
from alignedserve.ops.base import Activation, AttentionSpec, Linear, Ops, Projected, Value
from alignedserve.ops.shard import RankPart
from alignedserve.ops.step import StepInputs

# OPT's position table begins with two rows for padding.
POSITION_OFFSET = 2
# torch.nn.LayerNorm's default, with which the checkpoints were trained. config.json does not have it.
NORM_EPS = 1e-5

Norm = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class OptLayer:
    attention_norm: Norm
    qkv: Linear
    attention: AttentionSpec
    attention_out: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


class Opt:
    def __init__(self, config: ModelConfig, weights: WeightSource, ops: Ops, max_model_len: int) -> None:
        self.config = config
        self._ops = ops
        layers = Layers(weights, ops)
        hidden, narrow = config.hidden_size, config.embedding_dim or config.hidden_size
        self._embedding, self._lm_head = layers.embedding_and_head(
            "model.decoder.embed_tokens", config.vocab_size, narrow, config.tie_word_embeddings
        )
        self._positions = layers.parameter(
            "model.decoder.embed_positions.weight", config.max_position + POSITION_OFFSET, hidden
        )
        self._project_in = self._project_out = None
        if narrow != hidden:
            self._project_in = layers.linear(["model.decoder.project_in"], [hidden], narrow, can_adapt=False)
            self._project_out = layers.linear(
                ["model.decoder.project_out"], [narrow], hidden, can_adapt=False
            )
        self._layers = [_decoder_layer(config, layers, index) for index in range(config.num_layers)]
        has_final_norm = config.norm_before and config.final_norm
        self._final_norm = _norm(config, layers, "model.decoder.final_layer_norm") if has_final_norm else None

    def forward(self, step: StepInputs) -> Value:
        ops = self._ops
        x = ops.embed(self._embedding, step.token_ids)
        if self._project_in is not None:
            x = ops.linear(x, self._project_in)
        x = ops.embed(self._positions, step.positions, offset=POSITION_OFFSET, add_to=x)
        for layer in self._layers:
            x = self._attend(layer, x)
            x = self._mlp(layer, x)
        return x

    def final_states(self, hidden: Value) -> Value:
        if self._final_norm is not None:
            hidden = self._normed(hidden, self._final_norm)
        if self._project_out is not None:
            hidden = self._ops.linear(hidden, self._project_out)
        return hidden

    def logits(self, hidden: Value) -> Value:
        return self._ops.linear(self.final_states(hidden), self._lm_head)

    def _attend(self, layer: OptLayer, x: Value) -> Value:
        ops, before = self._ops, self.config.norm_before
        normed = self._normed(x, layer.attention_norm) if before else x
        attended = ops.attention(ops.linear(normed, layer.qkv), layer.attention, Projected(normed, layer.qkv))
        if layer.attention.outputs_only:
            x = ops.outputs(x)
        x = ops.linear(attended, layer.attention_out, residual=x)
        return x if before else self._normed(x, layer.attention_norm)

    def _mlp(self, layer: OptLayer, x: Value) -> Value:
        ops, before = self._ops, self.config.norm_before
        normed = self._normed(x, layer.mlp_norm) if before else x
        x = ops.linear(ops.linear(normed, layer.up), layer.down, residual=x)
        return x if before else self._normed(x, layer.mlp_norm)

    def _normed(self, x: Value, norm: Norm) -> Value:
        return self._ops.layer_norm(x, *norm, NORM_EPS)


def _norm(config: ModelConfig, layers: Layers, name: str) -> Norm:
    if not config.norm_affine:
        return None, None
    return (
        layers.parameter(f"{name}.weight", config.hidden_size),
        layers.parameter(f"{name}.bias", config.hidden_size),
    )


def _decoder_layer(config: ModelConfig, layers: Layers, index: int) -> OptLayer:
    prefix = f"model.decoder.layers.{index}"
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, mine = layers.shard.part(config.num_heads, config.head_dim), layers.shard.part(inner)
    return OptLayer(
        attention_norm=_norm(config, layers, f"{prefix}.self_attn_layer_norm"),
        qkv=layers.linear(
            [f"{prefix}.self_attn.{part}_proj" for part in "qkv"],
            [hidden] * 3,
            hidden,
            bias=config.qkv_bias,
            mine=RankPart(outputs=[heads] * 3),
        ),
        attention=AttentionSpec(
            layer=index,
            num_heads=layers.shard.num(config.num_heads),
            num_kv_heads=layers.shard.num(config.num_kv_heads),
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            outputs_only=index == config.num_layers - 1,
        ),
        attention_out=layers.linear(
            [f"{prefix}.self_attn.out_proj"],
            [hidden],
            hidden,
            bias=config.attention_out_bias,
            mine=RankPart(inputs=heads),
        ),
        mlp_norm=_norm(config, layers, f"{prefix}.final_layer_norm"),
        up=layers.linear(
            [f"{prefix}.fc1"],
            [inner],
            hidden,
            bias=config.mlp_bias,
            activation=Activation(config.activation),
            mine=RankPart(outputs=[mine]),
        ),
        down=layers.linear(
            [f"{prefix}.fc2"], [hidden], inner, bias=config.mlp_bias, mine=RankPart(inputs=mine)
        ),
    )
