"""What comes after attention in a layer: a gated MLP, or a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from alignedserve.models.base import Layers, PostNorm, add_linear
from alignedserve.models.config import ModelConfig, MoeConfig
from alignedserve.ops.base import Activation, Experts, Linear, Ops, Value
from alignedserve.ops.experts import Expert, ExpertsSpec


class Mlp(Protocol):
    def add_to(self, residual: Value, x: Value, ops: Ops) -> Value:
        """Returns `residual`, which may be overwritten, plus what the MLP makes of `x`."""
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
    """What a checkpoint calls the mixture of a layer, and the parts of an expert."""

    mixture: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


MIXTRAL_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


def make_mlp(
    config: ModelConfig, layers: Layers, index: int, names: ExpertNames, post_norm: PostNorm | None
) -> Mlp:
    prefix = f"model.layers.{index}"
    if config.moe is not None and config.moe.layers[index]:
        return _mixture(config.moe, config.hidden_size, layers, f"{prefix}.{names.mixture}", names)
    hidden, inner = config.hidden_size, config.intermediate_size
    return GatedMlp(
        gate_up=_gate_up(config, layers, f"{prefix}.mlp"),
        down=layers.linear([f"{prefix}.mlp.down_proj"], [hidden], inner, bias=config.mlp_bias),
        post_norm=post_norm,
    )


def _gate_up(config: ModelConfig, layers: Layers, prefix: str) -> Linear:
    hidden, widths = config.hidden_size, [config.intermediate_size] * 2
    activation = Activation(config.activation)
    if config.fused_projections:
        return layers.linear_split(f"{prefix}.gate_up_proj", widths, hidden, config.mlp_bias, activation)
    names = [f"{prefix}.{part}_proj" for part in ("gate", "up")]
    return layers.linear(names, widths, hidden, config.mlp_bias, activation)


def _mixture(moe: MoeConfig, hidden: int, layers: Layers, prefix: str, names: ExpertNames) -> ExpertMlp:
    inner = moe.intermediate_size
    spec = ExpertsSpec(moe.num_experts, moe.top_k, hidden, inner, moe.normalises)

    def take(number: int) -> Expert:
        expert = f"{prefix}.experts.{number}"
        return Expert(
            gate=layers.tensor(f"{expert}.{names.gate}.weight", inner, hidden),
            up=layers.tensor(f"{expert}.{names.up}.weight", inner, hidden),
            down=layers.tensor(f"{expert}.{names.down}.weight", hidden, inner),
        )

    router = layers.linear([f"{prefix}.gate"], [moe.num_experts], hidden)
    return ExpertMlp(router, layers.experts(spec, take))
