"""A mixture of experts: what one is made of, and how a row chooses its experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExpertsSpec:
    num_experts: int
    # How many experts each row goes through.
    top_k: int
    hidden_size: int
    # The inner width of one expert.
    intermediate_size: int
    # Whether the weights of a row's experts are scaled to sum to one.
    normalises: bool
    # Whether this rank has a part of each expert's inner values, and the ranks' results are added up.
    is_split: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k must be from 1 to the {self.num_experts} experts, not {self.top_k}")


@dataclass(frozen=True)
class Expert:
    """One expert as a checkpoint has it: down(silu(gate(x)) * up(x)). Each is [out, in]."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


# Delivers the experts one by one, so that no more than one is in memory beside those that a backend has copied.
TakeExpert = Callable[[int], Expert]


def check_expert(spec: ExpertsSpec, expert: Expert) -> None:
    inner, hidden = spec.intermediate_size, spec.hidden_size
    for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        if getattr(expert, name).shape != shape:
            raise ValueError(f"{name} must have shape {shape}, not {tuple(getattr(expert, name).shape)}")


def choose_experts(logits: torch.Tensor, spec: ExpertsSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns, for `logits` [rows, experts], the experts of each row and their float32 weights, [rows, top_k] each.

    The largest logit comes first; of equal ones that of the lowest number. The weights are the softmax over all
    experts.
    """
    wide = logits.float()
    chosen = wide.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
    weights = wide.softmax(dim=-1).gather(1, chosen)
    if spec.normalises:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen, weights
