"""Mixtures of experts in plain torch, expert by expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from alignedserve.ops.experts import ExpertsSpec, choose_experts, gated


class Projects(Protocol):
    def project(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        ...


@dataclass(frozen=True)
class TorchExperts:
    spec: ExpertsSpec
    # For each expert, the outputs of gate and then those of up.
    gate_up: Sequence[Projects]
    down: Sequence[Projects]


def mix(x: torch.Tensor, logits: torch.Tensor, experts: TorchExperts) -> torch.Tensor:
    """Adds a row's experts up in float32, in the order of its choices, and rounds once."""
    chosen, weights = choose_experts(logits, experts.spec)
    each = x.new_empty(*chosen.shape, experts.spec.hidden_size, dtype=torch.float32)
    for number in sorted(set(chosen.flatten().tolist())):
        row, rank = (chosen == number).nonzero(as_tuple=True)
        inner = gated(experts.gate_up[number].project(x[row]), experts.spec)
        each[row, rank] = experts.down[number].project(inner).float()
    return (each * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
