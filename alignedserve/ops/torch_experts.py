"""Mixtures of experts in plain torch, expert by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from alignedserve.ops.experts import ExpertsSpec, TakeExpert, check_expert, choose_experts


@dataclass(frozen=True)
class TorchExperts:
    spec: ExpertsSpec
    # [expert, gate's and then up's columns, hidden]
    gate_up: torch.Tensor
    # [expert, hidden, inner]
    down: torch.Tensor


def stack_experts(
    spec: ExpertsSpec, take: TakeExpert, dtype: torch.dtype, device: torch.device
) -> TorchExperts:
    num, inner, hidden = spec.num_experts, spec.intermediate_size, spec.hidden_size
    gate_up = torch.empty(num, 2 * inner, hidden, dtype=dtype, device=device)
    down = torch.empty(num, hidden, inner, dtype=dtype, device=device)
    for number in range(num):
        expert = take(number)
        check_expert(spec, expert)
        gate_up[number, :inner].copy_(expert.gate)
        gate_up[number, inner:].copy_(expert.up)
        down[number].copy_(expert.down)
    return TorchExperts(spec, gate_up, down)


def mix(x: torch.Tensor, logits: torch.Tensor, experts: TorchExperts) -> torch.Tensor:
    """Adds a row's experts up in the order in which it chose them, in float32, and rounds once."""
    chosen, weights = choose_experts(logits, experts.spec)
    each = x.new_empty(*chosen.shape, experts.spec.hidden_size, dtype=torch.float32)
    for number in sorted(set(chosen.flatten().tolist())):
        row, rank = (chosen == number).nonzero(as_tuple=True)
        gate, up = F.linear(x[row], experts.gate_up[number]).chunk(2, dim=-1)
        each[row, rank] = F.linear(F.silu(gate) * up, experts.down[number]).float()
    return (each * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
