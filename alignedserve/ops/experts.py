"""A mixture of experts: its weights, and how a row chooses its experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from alignedserve.ops.quantise import Part, form_of


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up from -limit to limit."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class ExpertsSpec:
    num_experts: int
    # Experts per row.
    top_k: int
    hidden_size: int
    # The inner width of one expert.
    intermediate_size: int
    # Whether the weights of a row's experts are scaled to sum to one.
    normalises: bool
    # Whether this rank has a part of each expert's inner values. The ranks' results are then added up.
    is_split: bool = False
    # How gate and up are combined; None: silu(gate) * up.
    swiglu: ClampedSwiglu | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k must be from 1 to the {self.num_experts} experts, not {self.top_k}")


@dataclass(frozen=True)
class Expert:
    """One expert of a checkpoint: down(silu(gate(x)) * up(x)), or with `ExpertsSpec.swiglu` in place of silu. Each
    is [out, in]."""

    gate: Part
    up: Part
    down: Part
    # With several ranks, only one has `down_bias`. All experts have the same kinds of biases.
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @property
    def gate_up_biases(self) -> list[torch.Tensor] | None:
        return None if self.gate_bias is None or self.up_bias is None else [self.gate_bias, self.up_bias]

    @property
    def down_biases(self) -> list[torch.Tensor] | None:
        return None if self.down_bias is None else [self.down_bias]


# Returns the experts one by one, so that only one is in memory beside those that a backend has copied.
TakeExpert = Callable[[int], Expert]


def taken(spec: ExpertsSpec, take: TakeExpert) -> Iterator[Expert]:
    """Yields all experts. Raises ValueError if one does not match `spec`, or has another form than the first one."""
    first: dict[str, str] = {}
    for number in range(spec.num_experts):
        expert = take(number)
        _check_expert(spec, expert)
        for name in ("gate", "up", "down"):
            form = form_of(getattr(expert, name))
            if form != first.setdefault(name, form):
                raise ValueError(f"{name} of expert {number} is in {form}, that of expert 0 in {first[name]}")
        yield expert


def _check_expert(spec: ExpertsSpec, expert: Expert) -> None:
    inner, hidden = spec.intermediate_size, spec.hidden_size
    for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        if getattr(expert, name).shape != shape:
            raise ValueError(f"{name} must have shape {shape}, not {tuple(getattr(expert, name).shape)}")
        bias = getattr(expert, f"{name}_bias")
        if bias is not None and bias.shape != shape[:1]:
            raise ValueError(f"{name}_bias must have shape {shape[:1]}, not {tuple(bias.shape)}")
    if (expert.gate_bias is None) != (expert.up_bias is None):
        raise ValueError("gate and up must both have a bias, or none")


def choose_experts(logits: torch.Tensor, spec: ExpertsSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns, for `logits` [rows, experts], the experts of each row and their float32 weights, [rows, top_k] each.

    The largest logit comes first; among equal ones, the lowest number. The weights are the softmax over all experts.
    """
    wide = logits.float()
    chosen = wide.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
    weights = wide.softmax(dim=-1).gather(1, chosen)
    if spec.normalises:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen, weights


def gated(gate_up: torch.Tensor, spec: ExpertsSpec) -> torch.Tensor:
    """Combines the outputs of gate and up, which lie one after the other."""
    gate, up = gate_up.chunk(2, dim=-1)
    if spec.swiglu is None:
        return F.silu(gate) * up
    alpha, limit = spec.swiglu.alpha, spec.swiglu.limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))
