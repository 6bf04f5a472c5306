"""The part of a layer after attention: a gated MLP, or a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from alignedserve.models.base import Layers, PostNorm, add_linear
from alignedserve.models.config import ModelConfig, MoeConfig
from alignedserve.ops.base import Activation, Experts, Linear, Ops, Value
from alignedserve.ops.experts import ClampedSwiglu, Expert, ExpertsSpec, TakeExpert
from alignedserve.ops.quantise import inputs_of, outputs_of
from alignedserve.ops.shard import RankPart


class Mlp(Protocol):
    def add_to(self, residual: Value, x: Value, ops: Ops) -> Value:
        """Returns `residual` plus the MLP's output for `x`. `residual` may be overwritten."""
        ...


@dataclass(frozen=True)
class GatedMlp:
    gate_up: Linear
    down: Linear
    post_norm: PostNorm | None = None

    def add_to(self, residual: Value, x: Value, ops: Ops) -> Value:
        return add_linear(ops, ops.linear(x, self.gate_up), self.down, residual, self.post_norm)


@dataclass(frozen=True)
class ExpertMlp:
    router: Linear
    experts: Experts

    def add_to(self, residual: Value, x: Value, ops: Ops) -> Value:
        return ops.mix_experts(x, ops.linear(x, self.router), self.experts, residual)


@dataclass(frozen=True)
class ExpertNames:
    """A checkpoint's names of a layer's mixture, of its router, and of an expert's parts if each expert has its own
    tensors."""

    mixture: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


MIXTRAL_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
GPT_OSS_NAMES = ExpertNames(router="router")


def make_mlp(
    config: ModelConfig, layers: Layers, index: int, names: ExpertNames, post_norm: PostNorm | None
) -> Mlp:
    prefix = f"model.layers.{index}"
    if config.moe is not None and config.moe.layers[index]:
        return _mixture(config.moe, config.hidden_size, layers, f"{prefix}.{names.mixture}", names)
    hidden, inner = config.hidden_size, config.intermediate_size
    return GatedMlp(
        gate_up=_gate_up(config, layers, f"{prefix}.mlp"),
        down=layers.linear(
            [f"{prefix}.mlp.down_proj"],
            [hidden],
            inner,
            bias=config.mlp_bias,
            mine=RankPart(inputs=layers.shard.part(inner)),
        ),
        post_norm=post_norm,
    )


def _gate_up(config: ModelConfig, layers: Layers, prefix: str) -> Linear:
    hidden, widths = config.hidden_size, [config.intermediate_size] * 2
    activation = Activation(config.activation)
    mine = RankPart(outputs=[layers.shard.part(config.intermediate_size)] * 2)
    if config.fused_projections:
        name = f"{prefix}.gate_up_proj"
        return layers.linear_split(name, widths, hidden, config.mlp_bias, activation, mine)
    names = [f"{prefix}.{part}_proj" for part in ("gate", "up")]
    return layers.linear(names, widths, hidden, config.mlp_bias, activation, mine)


def _mixture(moe: MoeConfig, hidden: int, layers: Layers, prefix: str, names: ExpertNames) -> ExpertMlp:
    spec = ExpertsSpec(
        moe.num_experts,
        moe.top_k,
        hidden,
        layers.shard.num(moe.intermediate_size),
        moe.normalises,
        is_split=layers.shard.size > 1,
        swiglu=ClampedSwiglu(*moe.clamped_swiglu) if moe.clamped_swiglu else None,
    )
    router = layers.router(f"{prefix}.{names.router}", moe.num_experts, hidden, bias=moe.is_stacked)
    if moe.is_stacked:
        return ExpertMlp(router, layers.experts(spec, _stacked(moe, hidden, layers, f"{prefix}.experts")))
    return ExpertMlp(
        router, layers.experts(spec, _one_by_one(moe, hidden, layers, f"{prefix}.experts", names))
    )


def _one_by_one(moe: MoeConfig, hidden: int, layers: Layers, prefix: str, names: ExpertNames) -> TakeExpert:
    """Experts with tensors of their own."""
    inner = moe.intermediate_size
    mine = layers.shard.part(inner)

    def take(number: int) -> Expert:
        expert = f"{prefix}.{number}"
        return Expert(
            gate=outputs_of(layers.weight(f"{expert}.{names.gate}", inner, hidden), mine),
            up=outputs_of(layers.weight(f"{expert}.{names.up}", inner, hidden), mine),
            down=inputs_of(layers.weight(f"{expert}.{names.down}", hidden, inner), mine),
        )

    return take


def _stacked(moe: MoeConfig, hidden: int, layers: Layers, prefix: str) -> TakeExpert:
    """Experts as slices of fused tensors. Gates and ups alternate along the outputs."""
    num, inner = moe.num_experts, moe.intermediate_size
    mine = layers.shard.part(inner)
    gate, up = (slice(2 * mine.start + first, 2 * mine.stop, 2) for first in (0, 1))
    gate_up_bias = layers.tensor(f"{prefix}.gate_up_proj_bias", num, 2 * inner)
    down_bias = layers.tensor(f"{prefix}.down_proj_bias", num, hidden)
    gate_up = layers.of_experts(f"{prefix}.gate_up_proj", num, 2 * inner, hidden)
    down = layers.of_experts(f"{prefix}.down_proj", num, hidden, inner)

    def take(number: int) -> Expert:
        both = gate_up(number)
        return Expert(
            gate=outputs_of(both, gate),
            up=outputs_of(both, up),
            down=inputs_of(down(number), mine),
            gate_bias=gate_up_bias[number, gate],
            up_bias=gate_up_bias[number, up],
            # The results of all ranks are added up, so only one rank adds the bias.
            down_bias=down_bias[number] if layers.shard.leads else None,
        )

    return take
